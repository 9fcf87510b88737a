// Sixteen lanes in plain C++: the fallback, and the meaning of the other vector_*.h's operations.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define DAF_INLINE static inline
#define DAF_MEMBER_INLINE inline
#define DAF_NEVER_INLINE
// Blocks stay in memory here: unrolling would not help.
#define DAF_UNROLLED

namespace {

struct Vector {
  static constexpr int lanes = 16;
  struct F {
    float lane[16];
  };
  struct I {
    uint32_t lane[16];
  };
  struct M {
    uint16_t bits;
  };

  // Lanes value(0), value(1) …; the same bytes as another type.
  template <class Result, class Each> DAF_INLINE Result each(Each&& value) {
    Result result;
    using Lane = std::remove_reference_t<decltype(result.lane[0])>;
    for (int i = 0; i < int(sizeof result / sizeof(Lane)); ++i) result.lane[i] = Lane(value(i));
    return result;
  }
  template <class Result> DAF_INLINE Result copied(const void* from) {
    Result result;
    std::memcpy(&result, from, sizeof result);
    return result;
  }
  template <class Each> DAF_INLINE M each_bit(Each&& value) {
    unsigned bits = 0;
    for (int i = 0; i < lanes; ++i) bits |= unsigned(bool(value(i))) << i;
    return {uint16_t(bits)};
  }

// An operator between the lanes of two operands, and the operand that a comparison chooses.
#define DAF_LANEWISE(Result, name, Operand, each, symbol)           \
  DAF_INLINE Result name(Operand a, Operand b) {                    \
    return each([&](int i) { return a.lane[i] symbol b.lane[i]; }); \
  }
#define DAF_CHOICE(Operand, name, compares)                                           \
  DAF_INLINE Operand name(Operand a, Operand b) {                                     \
    return each<Operand>(                                                             \
        [&](int i) { return a.lane[i] compares b.lane[i] ? a.lane[i] : b.lane[i]; }); \
  }
// The lane that a comparison chooses.
#define DAF_REDUCTION(Lane, name, Operand, compares)                                         \
  DAF_INLINE Lane name(const Operand& a) {                                                   \
    Lane result = a.lane[0];                                                                 \
    for (int i = 1; i < lanes; ++i) result = a.lane[i] compares result ? a.lane[i] : result; \
    return result;                                                                           \
  }

  // Memory.
  DAF_INLINE F load(const float* from) { return copied<F>(from); }
  DAF_INLINE I load(const uint32_t* from) { return copied<I>(from); }
  DAF_INLINE void store(uint32_t* to, I x) { std::memcpy(to, x.lane, sizeof x); }
  DAF_INLINE void store(float* to, F x) { std::memcpy(to, x.lane, sizeof x); }
  DAF_INLINE void stream(float* to, F x) { store(to, x); }
  DAF_INLINE F load_bfloat16(const uint16_t* from) {
    const Halves halves = copied<Halves>(from);
    return as_float(each<I>([&](int i) { return uint32_t(halves.lane[i]) << 16; }));
  }
  DAF_INLINE void store_bfloat16(uint16_t* to, F x) {
    const I bits = as_integer(x);
    store_halves(to, [&](int i) {
      const uint32_t u = bits.lane[i];
      return uint16_t((u + 0x7FFF + ((u >> 16) & 1)) >> 16);
    });
  }
  DAF_INLINE F load_float16(const uint16_t* from) {
    const Halves halves = copied<Halves>(from);
    return each<F>([&](int i) { return widen_half(halves.lane[i]); });
  }
  DAF_INLINE void store_float16(uint16_t* to, F x) {
    store_halves(to, [&](int i) { return narrow_half(x.lane[i]); });
  }
  DAF_INLINE void stream_fence() {}

  DAF_INLINE void prefetch(const void* from) { (void)from; }

  // Arithmetic.
  DAF_INLINE F set(float x) {
    return each<F>([&](int) { return x; });
  }
  DAF_LANEWISE(F, add, F, each<F>, +)
  DAF_LANEWISE(F, subtract, F, each<F>, -)
  DAF_LANEWISE(F, multiply, F, each<F>, *)
  DAF_CHOICE(F, least, <)
  DAF_CHOICE(F, greatest, >)
  DAF_INLINE F absolute(F a) { return as_float(bit_and(as_integer(a), set_integer(0x7FFFFFFF))); }
  // The greater of |a| and |b|; any number if either is NaN.
  DAF_INLINE F greatest_magnitude(F a, F b) { return greatest(absolute(a), absolute(b)); }
  DAF_INLINE float tree_sum(F a) {
    for (int width = 8; width > 0; width /= 2)
      for (int i = 0; i < width; ++i) a.lane[i] += a.lane[i + width];
    return a.lane[0];
  }
  // Both at once, each as by `tree_sum`.
  DAF_INLINE std::pair<float, float> tree_sums(F a, F b) { return {tree_sum(a), tree_sum(b)}; }
  DAF_REDUCTION(float, reduce_least, F, <)
  DAF_REDUCTION(float, reduce_greatest, F, >)

  // Comparison and choice.
  DAF_LANEWISE(M, greater, F, each_bit, >)
  DAF_LANEWISE(M, less_equal, F, each_bit, <=)
  // True where either is NaN.
  DAF_INLINE M unordered(F a, F b) {
    return each_bit([&](int i) { return a.lane[i] != a.lane[i] || b.lane[i] != b.lane[i]; });
  }
  DAF_INLINE M mask_from(uint16_t bits) { return {bits}; }
  DAF_INLINE uint16_t mask_bits(M m) { return m.bits; }
  DAF_INLINE M either(M a, M b) { return {uint16_t(a.bits | b.bits)}; }
  DAF_INLINE F select(M m, F yes, F no) {
    return each<F>([&](int i) { return m.bits >> i & 1 ? yes.lane[i] : no.lane[i]; });
  }

  // Integers.
  DAF_INLINE I as_integer(F a) { return copied<I>(&a); }
  DAF_INLINE F as_float(I a) { return copied<F>(&a); }
  DAF_INLINE I set_integer(uint32_t x) {
    return each<I>([&](int) { return x; });
  }
  DAF_LANEWISE(I, bit_and, I, each<I>, &)
  DAF_INLINE I bit_and_or(I a, uint32_t mask, uint32_t more) {
    return bit_or(bit_and(a, set_integer(mask)), set_integer(more));
  }
  DAF_LANEWISE(I, bit_or, I, each<I>, |)
  DAF_LANEWISE(I, bit_xor, I, each<I>, ^)
  DAF_LANEWISE(I, add_integer, I, each<I>, +)
  DAF_CHOICE(I, least_integer, <)
  DAF_CHOICE(I, greatest_integer, >)
  DAF_REDUCTION(uint32_t, reduce_greatest, I, >)
  template <int places> DAF_INLINE I shift_left(I a) {
    return each<I>([&](int i) { return a.lane[i] << places; });
  }
  template <int places> DAF_INLINE I shift_right(I a) {
    return each<I>([&](int i) { return a.lane[i] >> places; });
  }
  // Both for numbers in [0, 2^31).
  DAF_INLINE I truncate(F a) {
    return each<I>([&](int i) { return uint32_t(int32_t(a.lane[i])); });
  }
  // Nearest even, for magnitudes below 2^22: adding 1.5 * 2^23 leaves no bits for a fraction.
  DAF_INLINE I round(F a) {
    return each<I>([&](int i) {
      const float shifted = a.lane[i] + 0x1.8p23f;
      return copied<uint32_t>(&shifted) - 0x4B400000;
    });
  }
  DAF_INLINE F to_float(I a) {
    return each<F>([&](int i) { return float(int32_t(a.lane[i])); });
  }
  // a, with `value` (bits that a lacks) added where the mask is set.
  DAF_INLINE I add_where(I a, M m, uint32_t value) {
    return each<I>([&](int i) { return a.lane[i] | (m.bits >> i & 1 ? value : 0); });
  }
  DAF_INLINE M any_bit(I a, uint32_t value) {
    return each_bit([&](int i) { return (a.lane[i] & value) != 0; });
  }
  // table holds 16 floats; indices are below 16.
  DAF_INLINE F lookup(const float* table, I index) {
    return each<F>([&](int i) { return table[index.lane[i]]; });
  }

  template <int places> DAF_INLINE I rotate_left(I a) {
    if (places == 0) return a;
    return bit_or(shift_left<places % 32>(a), shift_right<(32 - places) % 32>(a));
  }

  // Bytes: 64 small codes at once; element 16 q + i is lane i of vector q.
  struct Bytes {
    uint8_t lane[64];
  };
  DAF_INLINE Bytes pack_bytes(const I (&quarters)[4]) {
    return each<Bytes>([&](int i) { return quarters[i / 16].lane[i % 16]; });
  }
  template <int quarter> DAF_INLINE I widen_bytes(const Bytes& bytes) {
    return each<I>([&](int i) { return uint32_t(bytes.lane[16 * quarter + i]); });
  }
  template <int bit> DAF_INLINE uint64_t bit_of_bytes(const Bytes& bytes) {
    uint64_t bits = 0;
    for (int i = 0; i < 64; ++i) bits |= uint64_t(bytes.lane[i] >> bit & 1) << i;
    return bits;
  }
  DAF_INLINE Bytes no_bytes() { return {}; }
  template <int bit> DAF_INLINE Bytes add_bit_to_bytes(Bytes bytes, uint64_t bits) {
    for (int i = 0; i < 64; ++i) bytes.lane[i] |= uint8_t((bits >> i & 1) << bit);
    return bytes;
  }

  DAF_INLINE Bytes set_bytes(int8_t x) {
    return each<Bytes>([&](int) { return x; });
  }
  // A table of 16 signed bytes, and its entries at indices below 16.
  DAF_INLINE Bytes load_table(const int8_t* sixteen) {
    return each<Bytes>([&](int i) { return sixteen[i % 16]; });
  }
  DAF_INLINE Bytes lookup_bytes(const Bytes& table, const Bytes& index) {
    return each<Bytes>([&](int i) { return table.lane[index.lane[i]]; });
  }
  DAF_INLINE Bytes subtract_bytes(const Bytes& a, const Bytes& b) {
    return each<Bytes>([&](int i) { return a.lane[i] - b.lane[i]; });
  }
  DAF_INLINE Bytes least_bytes(const Bytes& a, const Bytes& b) {  // unsigned
    return each<Bytes>([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  // Adds `value` to `sums` where a > b, both signed; returns where.
  template <int value>
  DAF_INLINE uint64_t add_where_greater(Bytes& sums, const Bytes& a, const Bytes& b) {
    uint64_t bits = 0;
    for (int i = 0; i < 64; ++i) {
      const uint64_t greater = int8_t(a.lane[i]) > int8_t(b.lane[i]);
      sums.lane[i] = uint8_t(sums.lane[i] + greater * value);
      bits |= greater << i;
    }
    return bits;
  }

  // Shorts: a block of 256 signed 16-bit numbers; sums wrap round.
  struct Shorts {
    uint16_t lane[256];
  };
  // Numbers 32 t … 32 t + 31, saturated.
  template <int t> DAF_INLINE void put_shorts(Shorts& shorts, const I& low, const I& high) {
    for (int i = 0; i < 16; ++i) {
      shorts.lane[32 * t + i] = saturated_short(low.lane[i]);
      shorts.lane[32 * t + 16 + i] = saturated_short(high.lane[i]);
    }
  }
  // Numbers 64 q … 64 q + 63, from signed bytes.
  template <int q> DAF_INLINE void put_bytes(Shorts& shorts, const Bytes& bytes) {
    for (int i = 0; i < 64; ++i) shorts.lane[64 * q + i] = uint16_t(int8_t(bytes.lane[i]));
  }
  template <int t> DAF_INLINE F shorts_to_float(const Shorts& shorts) {
    return each<F>([&](int i) { return float(int16_t(shorts.lane[16 * t + i])); });
  }
  // Numbers 64 q … 64 q + 63, the upper halves of their products with `multiplier`, saturated.
  template <int16_t multiplier, int q> DAF_INLINE Bytes narrow_shorts(const Shorts& shorts) {
    return each<Bytes>([&](int i) {
      const int x = int16_t(shorts.lane[64 * q + i]) * multiplier >> 16;
      return uint8_t(x < -128 ? -128 : x > 127 ? 127 : x);
    });
  }
  // Number 2 i of 32 changes sign with bit i of its word, number 2 i + 1 with bit 16 + i.
  DAF_INLINE void flip_shorts(Shorts& shorts, const uint32_t* signs) {
    for (int i = 0; i < 256; ++i) {
      const uint16_t negative = uint16_t(0 - (signs[i / 32] >> (i / 2 % 16 + i % 2 * 16) & 1));
      shorts.lane[i] = uint16_t((shorts.lane[i] ^ negative) - negative);
    }
  }
  // Shifts right, to nearest, halves upward.
  template <int places> DAF_INLINE void shift_shorts(Shorts& shorts) {
    for (int i = 0; i < 256; ++i)
      shorts.lane[i] = uint16_t((int16_t(shorts.lane[i]) + (1 << (places - 1))) >> places);
  }
  // Walsh–Hadamard transform, natural order, not normalised.
  DAF_INLINE void hadamard_shorts(Shorts& shorts) { hadamard_stages<1>(shorts.lane); }
  // sums + the products of shorts 64 q … 64 q + 63 and as many bytes, spread over lanes in any way.
  template <int q> DAF_INLINE I add_products(I sums, const Shorts& shorts, const Bytes& bytes) {
    for (int i = 0; i < 64; ++i)
      sums.lane[i % 16] += uint32_t(int16_t(shorts.lane[64 * q + i]) * int8_t(bytes.lane[i]));
    return sums;
  }
  DAF_INLINE int32_t reduce_add(const I& a) {
    uint32_t sum = 0;
    for (int i = 0; i < lanes; ++i) sum += a.lane[i];
    return int32_t(sum);
  }

  // Sixteen binary64 numbers, for sums. The product of widened numbers is exact.
  struct D {
    double lane[16];
  };
  DAF_INLINE D load(const double* from) { return copied<D>(from); }
  DAF_INLINE void store(double* to, const D& x) { std::memcpy(to, x.lane, sizeof x); }
  DAF_INLINE D widen(F a) {
    return each<D>([&](int i) { return a.lane[i]; });
  }
  DAF_INLINE D add(D a, const D& b) {
    for (int i = 0; i < lanes; ++i) a.lane[i] += b.lane[i];
    return a;
  }
  DAF_INLINE D add_product(D sum, const D& x, const D& y) {
    for (int i = 0; i < lanes; ++i) sum.lane[i] += x.lane[i] * y.lane[i];
    return sum;
  }

  // 64-bit lanes, for the generator: products of the low words, high words, packing of pairs.
  DAF_INLINE I multiply_wide(I a, uint32_t factor) {
    I result;
    for (int i = 0; i < lanes; i += 2) {
      const uint64_t product = uint64_t(a.lane[i]) * factor;
      result.lane[i] = uint32_t(product);
      result.lane[i + 1] = uint32_t(product >> 32);
    }
    return result;
  }
  // High words in place of low ones; the high ones are undefined.
  DAF_INLINE I high_words(I a) {
    return each<I>([&](int i) { return a.lane[i | 1]; });
  }
  DAF_INLINE I exclusive_or(I a, I b, uint32_t c) { return bit_xor(bit_xor(a, b), set_integer(c)); }
  DAF_INLINE I pack_pairs(I low, I high) {
    return each<I>([&](int i) { return i & 1 ? high.lane[i - 1] : low.lane[i]; });
  }

 private:
  DAF_INLINE uint16_t saturated_short(uint32_t bits) {
    const int32_t x = int32_t(bits);
    return uint16_t(x < -32768 ? -32768 : x > 32767 ? 32767 : x);
  }
  template <int stride> DAF_INLINE void hadamard_stages(uint16_t* x) {
    for (int base = 0; base < 256; base += 2 * stride)
      for (int i = base; i < base + stride; ++i) {
        const uint16_t low = x[i], high = x[i + stride];
        x[i] = uint16_t(low + high);
        x[i + stride] = uint16_t(low - high);
      }
    if constexpr (stride < 128) hadamard_stages<2 * stride>(x);
  }
  // Elements may lie at any address, even an odd one.
  struct Halves {
    uint16_t lane[16];
  };
  template <class Each> DAF_INLINE void store_halves(uint16_t* to, Each&& value) {
    const auto halves = each<Halves>(value);
    std::memcpy(to, halves.lane, sizeof halves);
  }
  DAF_INLINE float widen_half(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16, rest = half & 0x7FFF;
    uint32_t bits = (rest << 13) + 0x38000000;  // rebias the exponent
    if (rest >= 0x7C00) bits = (rest << 13) | 0x7F800000;
    const float subnormal = float(rest) * 0x1p-24f;
    if (rest < 0x0400) bits = copied<uint32_t>(&subnormal);
    bits |= sign;
    return copied<float>(&bits);
  }
  // Nearest even; NaN becomes the canonical one.
  DAF_INLINE uint16_t narrow_half(float value) {
    uint32_t bits = copied<uint32_t>(&value);
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    bits &= 0x7FFFFFFF;
    if (bits > 0x7F800000) return 0x7E00;
    if (bits >= 0x477FF000) return uint16_t(sign | 0x7C00);
    if (bits >= 0x38800000)
      return uint16_t(sign | ((bits - 0x38000000 + 0xFFF + (bits >> 13 & 1)) >> 13));
    // Below the least normal, adding 1/2 aligns fp16's last place with fp32's.
    const float aligned = copied<float>(&bits) + 0.5f;
    return uint16_t(sign | (copied<uint32_t>(&aligned) - 0x3F000000));
  }
};

#undef DAF_LANEWISE
#undef DAF_CHOICE
#undef DAF_REDUCTION

}  // namespace
