// A block of 256 elements in sixteen vectors: in from memory, out to memory, sums, transforms.
// Include after a vector_*.h. Everything is inlined into one translation unit for each
// instruction set, so nothing compiled for a wider set leaks into the others.
#pragma once

#include <cmath>
#include <cstring>

#include "jobs.h"

namespace {

using namespace daf;
using V = Vector;

constexpr int block_vectors = int(block_elements) / V::lanes;

struct Block {
  V::F x[block_vectors];
};

#define DAF_EACH_VECTOR DAF_UNROLLED for (int t = 0; t < block_vectors; ++t)

DAF_INLINE float from_bits(uint32_t bits) {
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

DAF_INLINE uint32_t to_bits(float value) {
  uint32_t result;
  std::memcpy(&result, &value, 4);
  return result;
}

DAF_INLINE float widen_bfloat16(uint16_t half) { return from_bits(uint32_t(half) << 16); }

// Nearest even; -0 becomes +0; too large becomes infinite.
DAF_INLINE uint16_t bfloat16_nearest(float value) {
  const uint32_t u = to_bits(value + 0.0f);
  return uint16_t((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

DAF_INLINE bool is_finite_bfloat16(uint16_t half) { return (half & 0x7F80) != 0x7F80; }

// --- affine ------------------------------------------------------------------------------------

// The 256 scales and shifts of one block, in the tables themselves where they lie so.
class AffineRows {
 public:
  explicit AffineRows(const Affine& affine) : affine_(affine) {}

  bool used() const { return affine_.channels != 0; }
  const float* scale() const { return scale_; }
  const float* shift() const { return shift_; }

  void move_to(uint64_t block) {
    const uint64_t first = block * block_elements;
    const uint64_t channel = first / affine_.inner % affine_.channels;
    if (affine_.inner == 1 && affine_.channels % block_elements == 0) {
      scale_ = affine_.scale + channel;
      shift_ = affine_.shift + channel;
    } else if (!still_right(channel)) {
      fill(first, channel);
    }
  }

 private:
  // Rows repeat where the block's channels are the same as those of the last one.
  bool still_right(uint64_t channel) {
    const bool periodic = affine_.inner == 1 && block_elements % affine_.channels == 0;
    const bool single = affine_.inner % block_elements == 0;
    const bool right = (periodic || single) && filled_ && channel == channel_;
    filled_ = true;
    channel_ = channel;
    return right;
  }

  void fill(uint64_t first, uint64_t channel) {
    scale_ = scale_row_;
    shift_ = shift_row_;
    uint64_t within = first % affine_.inner;
    for (uint64_t place = 0; place < block_elements;) {
      uint64_t run = affine_.inner == 1 ? affine_.channels - channel : affine_.inner - within;
      if (run > block_elements - place) run = block_elements - place;
      affine_.inner == 1 ? copy(place, channel, run) : repeat(place, channel, run);
      place += run;
      within = 0;
      channel += affine_.inner == 1 ? run : 1;
      if (channel == affine_.channels) channel = 0;
    }
  }

  void copy(uint64_t place, uint64_t channel, uint64_t run) {
    std::memcpy(scale_row_ + place, affine_.scale + channel, 4 * run);
    std::memcpy(shift_row_ + place, affine_.shift + channel, 4 * run);
  }

  void repeat(uint64_t place, uint64_t channel, uint64_t run) {
    const float scale = affine_.scale[channel], shift = affine_.shift[channel];
    for (uint64_t i = place; i < place + run; ++i) {
      scale_row_[i] = scale;
      shift_row_[i] = shift;
    }
  }

  const Affine affine_;
  const float *scale_ = nullptr, *shift_ = nullptr;
  uint64_t channel_ = 0;
  bool filled_ = false;
  alignas(64) float scale_row_[block_elements];
  alignas(64) float shift_row_[block_elements];
};

DAF_INLINE void apply_affine(Block& block, const AffineRows& rows) {
  DAF_EACH_VECTOR {
    const auto product = V::multiply(block.x[t], V::load(rows.scale() + V::lanes * t));
    block.x[t] = V::add(product, V::load(rows.shift() + V::lanes * t));
  }
}

// --- in ----------------------------------------------------------------------------------------

DAF_INLINE void load_elements(Block& block, const void* from, ElementType type) {
  const auto* halves = static_cast<const uint16_t*>(from);
  if (type == ElementType::float32) {
    DAF_EACH_VECTOR block.x[t] = V::load(static_cast<const float*>(from) + V::lanes * t);
  } else if (type == ElementType::bfloat16) {
    DAF_EACH_VECTOR block.x[t] = V::load_bfloat16(halves + V::lanes * t);
  } else {
    DAF_EACH_VECTOR block.x[t] = V::load_float16(halves + V::lanes * t);
  }
}

// Which lanes of vector t lie among the first `valid` elements.
DAF_INLINE uint16_t real_lanes(size_t valid, int t) {
  const size_t first = size_t(V::lanes) * t;
  const size_t here = valid <= first ? 0 : valid - first;
  return here >= 16 ? 0xFFFF : uint16_t((1u << here) - 1);
}

// The first `valid` elements stay, the others become `filling`.
DAF_INLINE void fill_padding(Block& block, size_t valid, float filling) {
  const auto other = V::set(filling);
  DAF_EACH_VECTOR block.x[t] =
      V::select(V::mask_from(real_lanes(valid, t)), block.x[t], other);
}

// Reads blocks of a source one after the other; padding is 0.
class Reader {
 public:
  explicit Reader(const Source& source) : source_(source), rows_(source.affine) {}

  size_t valid(size_t index) const {
    const uint64_t left = source_.count - index * block_elements;
    return left < block_elements ? size_t(left) : block_elements;
  }

  // The block's 256 values: in the source itself where they lie there as they are, else in
  // `room` (256 floats).
  const float* fetch(size_t index, float* room) {
    if (source_.type == ElementType::float32 && !rows_.used() && valid(index) == block_elements)
      return static_cast<const float*>(source_.data) + index * block_elements;
    Block block;
    read_any(block, index);
    DAF_EACH_VECTOR V::store(room + V::lanes * t, block.x[t]);
    return room;
  }

  // Asks for a block of the next batch while this one is worked on; any index will do.
  DAF_MEMBER_INLINE void expect(size_t index) const {
    const size_t bytes = block_elements * element_bytes(source_.type);
    const char* from = static_cast<const char*>(source_.data) + index * bytes;
    for (size_t line = 0; line < bytes; line += 64) V::prefetch(from + line);
  }

  void read(Block& block, size_t index) {
    alignas(64) float room[block_elements];
    const float* from = fetch(index, room);
    DAF_EACH_VECTOR block.x[t] = V::load(from + V::lanes * t);
  }

 private:
  DAF_NEVER_INLINE void read_any(Block& block, size_t index) {
    const size_t bytes = element_bytes(source_.type), here = valid(index);
    const char* from = static_cast<const char*>(source_.data) + index * block_elements * bytes;
    if (here < block_elements) from = copy_tail(from, here * bytes);
    load_elements(block, from, source_.type);
    if (rows_.used()) {
      rows_.move_to(index);
      apply_affine(block, rows_);
      if (here < block_elements) fill_padding(block, here, 0.0f);
    }
  }

  const char* copy_tail(const char* from, size_t bytes) {
    std::memset(tail_, 0, sizeof tail_);
    std::memcpy(tail_, from, bytes);
    return tail_;
  }

  const Source source_;
  AffineRows rows_;
  alignas(64) char tail_[block_elements * 4];
};

// Blocks are encoded in batches, stage by stage: while one block waits for its sum, its root or
// its quotient, the same stage of the next ones runs.
constexpr size_t batch_blocks = 8;

struct Batch {
  const float* rows[batch_blocks];
  alignas(64) float room[batch_blocks][block_elements];

  DAF_MEMBER_INLINE void load(Block& block, size_t i) const {
    DAF_EACH_VECTOR block.x[t] = V::load(rows[i] + V::lanes * t);
  }
  DAF_MEMBER_INLINE void keep(const Block& block, size_t i) {
    DAF_EACH_VECTOR V::store(room[i] + V::lanes * t, block.x[t]);
    rows[i] = room[i];
  }
};

// --- out ---------------------------------------------------------------------------------------

DAF_INLINE void store_elements(const Block& block, void* to, ElementType type) {
  auto* halves = static_cast<uint16_t*>(to);
  if (type == ElementType::float32) {
    DAF_EACH_VECTOR V::store(static_cast<float*>(to) + V::lanes * t, block.x[t]);
  } else if (type == ElementType::bfloat16) {
    DAF_EACH_VECTOR V::store_bfloat16(halves + V::lanes * t, block.x[t]);
  } else {
    DAF_EACH_VECTOR V::store_float16(halves + V::lanes * t, block.x[t]);
  }
}

DAF_INLINE V::F canonical(V::F x) {
  return V::select(V::unordered(x), V::as_float(V::set_integer(0x7FC00000)), x);
}

// Writes blocks of a target: affine, accumulate, mask, rounding (docs/format.md, section 7).
class Writer {
 public:
  explicit Writer(const Target& target) : target_(target), rows_(target.affine) {
    const bool aligned = reinterpret_cast<uintptr_t>(target.data) % 64 == 0;
    plain_ = target.type == ElementType::float32 && !rows_.used() && !target.accumulate &&
             !target.mask;
    streams_ = plain_ && target.stream && aligned;
  }
  ~Writer() {
    if (streams_) V::stream_fence();
  }

  // As Reader::read: the common case inline, the others through memory.
  DAF_MEMBER_INLINE void write(const Block& block, size_t index) {
    const bool whole = target_.count - index * block_elements >= block_elements;
    if (plain_ && whole) {
      float* to = static_cast<float*>(target_.data) + index * block_elements;
      if (streams_) {
        DAF_EACH_VECTOR V::stream(to + V::lanes * t, block.x[t]);
      } else {
        DAF_EACH_VECTOR V::store(to + V::lanes * t, block.x[t]);
      }
    } else {
      Block other = block;
      write_any(other, index);
    }
  }

 private:
  DAF_NEVER_INLINE void write_any(Block& block, size_t index) {
    const size_t bytes = element_bytes(target_.type);
    const uint64_t left = target_.count - index * block_elements;
    char* to = static_cast<char*>(target_.data) + index * block_elements * bytes;
    if (left >= block_elements) {
      finish(block, index, to);
      store_elements(block, to, target_.type);
    } else {
      std::memset(tail_, 0, sizeof tail_);
      std::memcpy(tail_, to, left * bytes);
      finish(block, index, tail_);
      store_elements(block, tail_, target_.type);
      std::memcpy(to, tail_, left * bytes);
    }
  }

  DAF_MEMBER_INLINE void finish(Block& block, size_t index, const char* old) {
    if (rows_.used()) {
      rows_.move_to(index);
      apply_affine(block, rows_);
    }
    if (target_.accumulate) {
      Block before;
      load_elements(before, old, target_.type);
      DAF_EACH_VECTOR block.x[t] = V::add(before.x[t], block.x[t]);
    }
    if (rows_.used() || target_.accumulate) {
      DAF_EACH_VECTOR block.x[t] = canonical(block.x[t]);
    }
    if (target_.mask) apply_mask(block, index);
  }

  DAF_MEMBER_INLINE void apply_mask(Block& block, size_t index) {
    const uint32_t* words = target_.mask + index * words_per_block;
    DAF_EACH_VECTOR {
      const auto chosen = V::mask_from(uint16_t(words[t / 2] >> (t % 2 * 16)));
      block.x[t] = V::select(chosen, block.x[t], V::set(0.0f));
    }
  }

  const Target target_;
  AffineRows rows_;
  bool plain_, streams_;
  alignas(64) char tail_[block_elements * 4];
};

// --- whole-block arithmetic --------------------------------------------------------------------

// The sum of leaf(0) … leaf(15) by halving strides. Depth first: few vectors are alive at once.
template <int width = 1, class Leaf>
DAF_INLINE V::F fold(Leaf&& leaf, int t = 0) {
  if constexpr (width == block_vectors)
    return leaf(t);
  else
    return V::add(fold<2 * width>(leaf, t), fold<2 * width>(leaf, t + width));
}

template <int stride>
DAF_INLINE void butterflies_across(Block& block) {
  DAF_EACH_VECTOR if (!(t & stride)) {
    const auto low = block.x[t], high = block.x[t + stride];
    block.x[t] = V::add(low, high);
    block.x[t + stride] = V::subtract(low, high);
  }
}

// Walsh–Hadamard transform, natural order, not normalised.
DAF_INLINE void hadamard(Block& block) {
  DAF_EACH_VECTOR {
    auto x = V::butterfly<1>(block.x[t]);
    x = V::butterfly<2>(x);
    x = V::butterfly<4>(x);
    block.x[t] = V::butterfly<8>(x);
  }
  butterflies_across<1>(block);
  butterflies_across<2>(block);
  butterflies_across<4>(block);
  butterflies_across<8>(block);
}

DAF_INLINE void flip_signs(Block& block, const uint16_t* signs) {
  DAF_EACH_VECTOR block.x[t] = V::flip(block.x[t], V::mask_from(signs[t]));
}

DAF_INLINE void multiply_all(Block& block, float factor) {
  const auto everywhere = V::set(factor);
  DAF_EACH_VECTOR block.x[t] = V::multiply(block.x[t], everywhere);
}

// The power of two that brings a block near 1, and its inverse.
struct Prescale {
  float factor, inverse;
  bool finite;
};

DAF_INLINE Prescale prescale_of(const float* row) {
  // Twice the bit pattern drops the sign and keeps the order.
  auto greatest = V::set_integer(0);
  DAF_EACH_VECTOR {
    const auto bits = V::as_integer(V::load(row + V::lanes * t));
    greatest = V::greatest_integer(greatest, V::shift_left<1>(bits));
  }
  const uint32_t bits = V::reduce_greatest(greatest) >> 1;
  uint32_t exponent = bits >> 23;
  if (exponent < 1) exponent = 1;
  if (exponent > 253) exponent = 253;
  return {from_bits((254 - exponent) << 23), from_bits(exponent << 23), bits < 0x7F800000};
}

// --- planes ------------------------------------------------------------------------------------

// Where plane p of a tensor keeps block `index`, as 16 halfwords (little-endian words).
DAF_INLINE uint16_t* plane_block(uint32_t* planes, size_t blocks, int plane, size_t index) {
  return reinterpret_cast<uint16_t*>(planes + (plane * blocks + index) * words_per_block);
}

DAF_INLINE const uint16_t* plane_block(const uint32_t* planes, size_t blocks, int plane,
                                       size_t index) {
  return plane_block(const_cast<uint32_t*>(planes), blocks, plane, index);
}

DAF_INLINE void clear_planes(uint32_t* planes, size_t blocks, int bits, size_t index) {
  for (int plane = 0; plane < bits; ++plane)
    std::memset(plane_block(planes, blocks, plane, index), 0, 4 * words_per_block);
}

DAF_INLINE uint16_t load_half(const uint16_t* from) {
  uint16_t result;
  std::memcpy(&result, from, 2);
  return result;
}

DAF_INLINE void store_half(uint16_t* to, uint16_t value) { std::memcpy(to, &value, 2); }

template <int bits, int plane>
DAF_INLINE void read_plane(const uint16_t* const (&rows)[bits], int q, V::Bytes& bytes) {
  uint64_t word;
  std::memcpy(&word, rows[plane] + 4 * q, 8);
  bytes = V::add_bit_to_bytes<bits - 1 - plane>(bytes, word);
  if constexpr (plane + 1 < bits) read_plane<bits, plane + 1>(rows, q, bytes);
}

template <int bits, int plane>
DAF_INLINE void write_plane(uint16_t* const (&rows)[bits], int q, V::Bytes bytes) {
  const uint64_t word = V::bit_of_bytes<bits - 1 - plane>(bytes);
  std::memcpy(rows[plane] + 4 * q, &word, 8);
  if constexpr (plane + 1 < bits) write_plane<bits, plane + 1>(rows, q, bytes);
}

// Codes of vectors 4 q … 4 q + 3 of a block.
template <int bits>
DAF_INLINE void read_codes(const uint16_t* const (&rows)[bits], int q, V::I (&codes)[4]) {
  auto bytes = V::no_bytes();
  read_plane<bits, 0>(rows, q, bytes);
  codes[0] = V::widen_bytes<0>(bytes);
  codes[1] = V::widen_bytes<1>(bytes);
  codes[2] = V::widen_bytes<2>(bytes);
  codes[3] = V::widen_bytes<3>(bytes);
}

template <int bits>
DAF_INLINE void write_codes(uint16_t* const (&rows)[bits], int q, const V::I (&codes)[4]) {
  write_plane<bits, 0>(rows, q, V::pack_bytes(codes));
}

template <int bits, class Half, class Word>
DAF_INLINE void plane_rows(Half* (&rows)[bits], Word* planes, size_t blocks, size_t index) {
  for (int plane = 0; plane < bits; ++plane) rows[plane] = plane_block(planes, blocks, plane, index);
}

DAF_INLINE void mark_non_finite(uint16_t* header) {
  header[0] = non_finite_header;
  header[1] = non_finite_header;
}

DAF_INLINE void fill_with_nan(Block& block) {
  DAF_EACH_VECTOR block.x[t] = V::as_float(V::set_integer(0x7FC00000));
}

}  // namespace
