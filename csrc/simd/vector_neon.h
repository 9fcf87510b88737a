// Sixteen lanes in four NEON registers (any AArch64 processor). Meanings: vector_portable.h.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <utility>

#include "simd/neon_registers.h"

namespace {

struct Vector {
  static constexpr int lanes = 16;
  struct F {
    float32x4_t part[4];
  };
  struct I {
    uint32x4_t part[4];
  };
  using M = I;  // all ones where set

  // The four registers value(0) … value(3).
  template <class Result, class Each> DAF_INLINE Result each(Each&& value) {
    return {{value(0), value(1), value(2), value(3)}};
  }

// An operation on the registers of one operand, or of two.
#define DAF_EACH(Result, name, Operand, operation)                    \
  DAF_INLINE Result name(Operand a) {                                 \
    return each<Result>([&](int i) { return operation(a.part[i]); }); \
  }
#define DAF_PAIRWISE(Result, name, Operand, operation)                           \
  DAF_INLINE Result name(Operand a, Operand b) {                                 \
    return each<Result>([&](int i) { return operation(a.part[i], b.part[i]); }); \
  }

  DAF_INLINE F load(const float* from) {
    return each<F>([&](int i) { return vld1q_f32(from + 4 * i); });
  }
  DAF_INLINE I load(const uint32_t* from) {
    return each<I>([&](int i) { return vld1q_u32(from + 4 * i); });
  }
  DAF_INLINE void store(float* to, F x) {
    for (int i = 0; i < 4; ++i) vst1q_f32(to + 4 * i, x.part[i]);
  }
  DAF_INLINE void store(uint32_t* to, I x) {
    for (int i = 0; i < 4; ++i) vst1q_u32(to + 4 * i, x.part[i]);
  }
  // These processors detect overwritten whole lines themselves.
  DAF_INLINE void stream(float* to, F x) { store(to, x); }
  DAF_INLINE void stream_fence() {}

  DAF_INLINE F load_bfloat16(const uint16_t* from) {
    const uint16x8_t zero = vdupq_n_u16(0), low = vld1q_u16(from), high = vld1q_u16(from + 8);
    return as_float({{vreinterpretq_u32_u16(vzip1q_u16(zero, low)),
                      vreinterpretq_u32_u16(vzip2q_u16(zero, low)),
                      vreinterpretq_u32_u16(vzip1q_u16(zero, high)),
                      vreinterpretq_u32_u16(vzip2q_u16(zero, high))}});
  }
  DAF_INLINE void store_bfloat16(uint16_t* to, F x) {
    const I bits = as_integer(x);
    const I odd = bit_and(shift_right<16>(bits), set_integer(1));
    const I rounded = add_integer(add_integer(bits, set_integer(0x7FFF)), odd);
    vst1q_u16(to, high_halves(rounded.part[0], rounded.part[1]));
    vst1q_u16(to + 8, high_halves(rounded.part[2], rounded.part[3]));
  }
  DAF_INLINE F load_float16(const uint16_t* from) {
    return each<F>(
        [&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + 4 * i))); });
  }
  DAF_INLINE void store_float16(uint16_t* to, F x) {
    for (int i = 0; i < 4; ++i) vst1_u16(to + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.part[i])));
  }

  DAF_INLINE void prefetch(const void* from) { __builtin_prefetch(from); }

  DAF_INLINE F set(float x) {
    return each<F>([&](int) { return vdupq_n_f32(x); });
  }
  DAF_PAIRWISE(F, add, F, vaddq_f32)
  DAF_PAIRWISE(F, subtract, F, vsubq_f32)
  DAF_PAIRWISE(F, multiply, F, vmulq_f32)
  DAF_PAIRWISE(F, least, F, least_of_four)
  DAF_PAIRWISE(F, greatest, F, greatest_of_four)
  DAF_INLINE F greatest_magnitude(F a, F b) {
    return each<F>([&](int i) { return vmaxnmq_f32(vabsq_f32(a.part[i]), vabsq_f32(b.part[i])); });
  }
  DAF_INLINE float tree_sum(F a) {
    const float32x4_t four =
        vaddq_f32(vaddq_f32(a.part[0], a.part[2]), vaddq_f32(a.part[1], a.part[3]));
    return vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)));
  }
  DAF_INLINE std::pair<float, float> tree_sums(F a, F b) { return {tree_sum(a), tree_sum(b)}; }
  DAF_INLINE float reduce_least(F a) {
    const float32x4_t four =
        least_of_four(least_of_four(a.part[0], a.part[2]), least_of_four(a.part[1], a.part[3]));
    const float32x4_t two = least_of_four(four, vextq_f32(four, four, 2));
    return vgetq_lane_f32(least_of_four(two, vextq_f32(two, two, 1)), 0);
  }
  DAF_INLINE float reduce_greatest(F a) {
    const float32x4_t four = greatest_of_four(greatest_of_four(a.part[0], a.part[2]),
                                              greatest_of_four(a.part[1], a.part[3]));
    const float32x4_t two = greatest_of_four(four, vextq_f32(four, four, 2));
    return vgetq_lane_f32(greatest_of_four(two, vextq_f32(two, two, 1)), 0);
  }

  DAF_PAIRWISE(M, greater, F, vcgtq_f32)
  DAF_PAIRWISE(M, less_equal, F, vcleq_f32)
  // The greater of two numbers is NaN if either is.
  DAF_INLINE M unordered(F a, F b) {
    return each<M>([&](int i) {
      const float32x4_t greater = vmaxq_f32(a.part[i], b.part[i]);
      return vmvnq_u32(vceqq_f32(greater, greater));
    });
  }
  DAF_INLINE M mask_from(uint16_t bits) {
    return each<M>([&](int i) { return vtstq_u32(vdupq_n_u32(bits), bits_of_quad(i)); });
  }
  // Each register gives its four bits of one word; lanes share no bit.
  DAF_INLINE uint16_t mask_bits(M m) {
    const uint32x4_t low = vbslq_u32(bits_of_quad(0), m.part[0], m.part[1]);
    const uint32x4_t high = vbslq_u32(bits_of_quad(2), m.part[2], m.part[3]);
    const uint32x4_t lower = vorrq_u32(bits_of_quad(0), bits_of_quad(1));
    const uint32x4_t upper = vorrq_u32(bits_of_quad(2), bits_of_quad(3));
    const uint32x4_t words = vandq_u32(vbslq_u32(lower, low, high), vorrq_u32(lower, upper));
    return uint16_t(vaddvq_u32(words));
  }
  DAF_PAIRWISE(M, either, M, vorrq_u32)
  DAF_INLINE F select(M m, F yes, F no) {
    return each<F>([&](int i) { return vbslq_f32(m.part[i], yes.part[i], no.part[i]); });
  }

  DAF_EACH(I, as_integer, F, vreinterpretq_u32_f32)
  DAF_EACH(F, as_float, I, vreinterpretq_f32_u32)
  DAF_INLINE I set_integer(uint32_t x) {
    return each<I>([&](int) { return vdupq_n_u32(x); });
  }
  DAF_PAIRWISE(I, bit_and, I, vandq_u32)
  DAF_INLINE I bit_and_or(I a, uint32_t mask, uint32_t more) {
    return bit_or(bit_and(a, set_integer(mask)), set_integer(more));
  }
  DAF_PAIRWISE(I, bit_or, I, vorrq_u32)
  DAF_PAIRWISE(I, bit_xor, I, veorq_u32)
  DAF_PAIRWISE(I, add_integer, I, vaddq_u32)
  DAF_PAIRWISE(I, least_integer, I, vminq_u32)
  DAF_PAIRWISE(I, greatest_integer, I, vmaxq_u32)
  DAF_INLINE uint32_t reduce_greatest(I a) {
    return vmaxvq_u32(vmaxq_u32(vmaxq_u32(a.part[0], a.part[1]), vmaxq_u32(a.part[2], a.part[3])));
  }
  template <int places> DAF_INLINE I shift_left(I a) {
    return each<I>([&](int i) { return vshlq_n_u32(a.part[i], places); });
  }
  template <int places> DAF_INLINE I shift_right(I a) {
    return each<I>([&](int i) { return vshrq_n_u32(a.part[i], places); });
  }
  DAF_EACH(I, truncate, F, vcvtq_u32_f32)
  DAF_INLINE I round(F a) {
    return each<I>([&](int i) { return vreinterpretq_u32_s32(vcvtnq_s32_f32(a.part[i])); });
  }
  DAF_EACH(F, to_float, I, vcvtq_f32_u32)
  DAF_INLINE I add_where(I a, M m, uint32_t value) {
    return each<I>(
        [&](int i) { return vorrq_u32(a.part[i], vandq_u32(m.part[i], vdupq_n_u32(value))); });
  }
  DAF_INLINE M any_bit(I a, uint32_t value) {
    return each<M>([&](int i) { return vtstq_u32(a.part[i], vdupq_n_u32(value)); });
  }
  // Looks up the table's 64 bytes four at a time, from 4 * index on.
  DAF_INLINE F lookup(const float* table, I index) {
    const auto* from = reinterpret_cast<const uint8_t*>(table);
    const uint8x16x4_t bytes = {
        {vld1q_u8(from), vld1q_u8(from + 16), vld1q_u8(from + 32), vld1q_u8(from + 48)}};
    return each<F>([&](int i) {
      const uint32x4_t places =
          vmlaq_u32(vdupq_n_u32(0x03020100), index.part[i], vdupq_n_u32(0x04040404));
      return vreinterpretq_f32_u8(vqtbl4q_u8(bytes, vreinterpretq_u8_u32(places)));
    });
  }

  template <int places> DAF_INLINE I rotate_left(I a) {
    if constexpr (places == 0) return a;
    return each<I>([&](int i) {
      return vsriq_n_u32(vshlq_n_u32(a.part[i], places), a.part[i], (32 - places) % 32);
    });
  }

  struct Bytes {
    uint8x16_t part[4];
  };
  DAF_INLINE Bytes pack_bytes(const I (&quarters)[4]) {
    return each<Bytes>([&](int i) { return low_bytes(quarters[i]); });
  }
  // Byte 4 i + k goes to lane k of register i, with 0 (which no byte's index finds) around it.
  template <int quarter> DAF_INLINE I widen_bytes(Bytes bytes) {
    return each<I>([&](int i) {
      const uint32_t first = 0xFFFFFF00u + 4 * uint32_t(i);
      const uint32x4_t places = {first, first + 1, first + 2, first + 3};
      return vreinterpretq_u32_u8(vqtbl1q_u8(bytes.part[quarter], vreinterpretq_u8_u32(places)));
    });
  }
  template <int bit> DAF_INLINE uint64_t bit_of_bytes(Bytes bytes) {
    return bits_of_mask(
        each<Bytes>([&](int i) { return vtstq_u8(bytes.part[i], vdupq_n_u8(1 << bit)); }));
  }
  DAF_INLINE Bytes no_bytes() {
    return each<Bytes>([&](int) { return vdupq_n_u8(0); });
  }
  template <int bit> DAF_INLINE Bytes add_bit_to_bytes(Bytes bytes, uint64_t bits) {
    const uint8x16_t all = vreinterpretq_u8_u64(vdupq_n_u64(bits));
    return each<Bytes>([&](int i) {
      const uint8x16_t chosen = vtstq_u8(vqtbl1q_u8(all, eight_each(i)), bits_of_eight());
      return vorrq_u8(bytes.part[i], vandq_u8(chosen, vdupq_n_u8(1 << bit)));
    });
  }

  DAF_INLINE Bytes set_bytes(int8_t x) {
    return each<Bytes>([&](int) { return vdupq_n_u8(uint8_t(x)); });
  }
  DAF_INLINE Bytes load_table(const int8_t* sixteen) {
    return each<Bytes>([&](int) { return vreinterpretq_u8_s8(vld1q_s8(sixteen)); });
  }
  DAF_INLINE Bytes lookup_bytes(Bytes table, Bytes index) {
    return each<Bytes>([&](int i) { return vqtbl1q_u8(table.part[i], index.part[i]); });
  }
  DAF_PAIRWISE(Bytes, subtract_bytes, Bytes, vsubq_u8)
  DAF_PAIRWISE(Bytes, least_bytes, Bytes, vminq_u8)
  template <int value> DAF_INLINE uint64_t add_where_greater(Bytes& sums, Bytes a, Bytes b) {
    const Bytes greater = each<Bytes>([&](int i) {
      return vcgtq_s8(vreinterpretq_s8_u8(a.part[i]), vreinterpretq_s8_u8(b.part[i]));
    });
    for (int i = 0; i < 4; ++i)
      sums.part[i] = vaddq_u8(sums.part[i], vandq_u8(greater.part[i], vdupq_n_u8(value)));
    return bits_of_mask(greater);
  }

  struct Shorts {
    int16x8_t x[32];
  };
  template <int t> DAF_INLINE void put_shorts(Shorts& shorts, I low, I high) {
    shorts.x[4 * t] = saturated(low.part[0], low.part[1]);
    shorts.x[4 * t + 1] = saturated(low.part[2], low.part[3]);
    shorts.x[4 * t + 2] = saturated(high.part[0], high.part[1]);
    shorts.x[4 * t + 3] = saturated(high.part[2], high.part[3]);
  }
  template <int q> DAF_INLINE void put_bytes(Shorts& shorts, Bytes bytes) {
    for (int i = 0; i < 4; ++i) {
      const int8x16_t here = vreinterpretq_s8_u8(bytes.part[i]);
      shorts.x[8 * q + 2 * i] = vmovl_s8(vget_low_s8(here));
      shorts.x[8 * q + 2 * i + 1] = vmovl_high_s8(here);
    }
  }
  template <int t> DAF_INLINE F shorts_to_float(const Shorts& shorts) {
    const int16x8_t low = shorts.x[2 * t], high = shorts.x[2 * t + 1];
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))}};
  }
  // The instruction doubles the product: half the multiplier gives the same upper half.
  template <int16_t multiplier, int q> DAF_INLINE Bytes narrow_shorts(const Shorts& shorts) {
    static_assert(multiplier % 2 == 0, "an odd multiplier has no half");
    return each<Bytes>([&](int i) {
      const int16x8_t low = vqdmulhq_n_s16(shorts.x[8 * q + 2 * i], multiplier / 2);
      const int16x8_t high = vqdmulhq_n_s16(shorts.x[8 * q + 2 * i + 1], multiplier / 2);
      return vreinterpretq_u8_s8(vqmovn_high_s16(vqmovn_s16(low), high));
    });
  }
  DAF_INLINE void flip_shorts(Shorts& shorts, const uint32_t* signs) {
    DAF_UNROLLED for (int t = 0; t < 8; ++t) {
      const uint16x8_t word = vreinterpretq_u16_u32(vdupq_n_u32(signs[t]));
      for (int i = 0; i < 4; ++i) {
        const uint16x8_t bits = vreinterpretq_u16_u32(vmulq_n_u32(bits_of_quad(i), 0x00010001));
        const int16x8_t negative = vreinterpretq_s16_u16(vtstq_u16(word, bits));
        int16x8_t& x = shorts.x[4 * t + i];
        x = vsubq_s16(veorq_s16(x, negative), negative);
      }
    }
  }
  template <int places> DAF_INLINE void shift_shorts(Shorts& shorts) {
    DAF_UNROLLED for (int t = 0; t < 32; ++t) shorts.x[t] = vrshrq_n_s16(shorts.x[t], places);
  }
  // A block fills the registers: eight of them at a time, then every eighth.
  DAF_INLINE void hadamard_shorts(Shorts& shorts) {
    int16x8_t* x = shorts.x;
    DAF_UNROLLED for (int t = 0; t < 32; t += 8) hadamard_of_eight(x + t);
    DAF_UNROLLED for (int t = 0; t < 8; ++t) {
      sum_and_difference(x[t], x[t + 8]);
      sum_and_difference(x[t + 16], x[t + 24]);
      sum_and_difference(x[t], x[t + 16]);
      sum_and_difference(x[t + 8], x[t + 24]);
    }
  }
  template <int q> DAF_INLINE I add_products(I sums, const Shorts& shorts, Bytes bytes) {
    Shorts wide;
    put_bytes<q>(wide, bytes);
    return each<I>([&](int i) {
      int32x4_t sum = vreinterpretq_s32_u32(sums.part[i]);
      for (int t = 8 * q + 2 * i; t < 8 * q + 2 * i + 2; ++t) {
        sum = vmlal_s16(sum, vget_low_s16(shorts.x[t]), vget_low_s16(wide.x[t]));
        sum = vmlal_high_s16(sum, shorts.x[t], wide.x[t]);
      }
      return vreinterpretq_u32_s32(sum);
    });
  }
  DAF_INLINE int32_t reduce_add(I a) {
    return int32_t(
        vaddvq_u32(vaddq_u32(vaddq_u32(a.part[0], a.part[1]), vaddq_u32(a.part[2], a.part[3]))));
  }

  // Sixteen binary64 numbers for sums. Products of widened numbers are exact: fma rounds as add.
  struct D {
    float64x2_t pair[8];
  };
  DAF_INLINE D load(const double* from) {
    D result;
    for (int i = 0; i < 8; ++i) result.pair[i] = vld1q_f64(from + 2 * i);
    return result;
  }
  DAF_INLINE void store(double* to, D x) {
    for (int i = 0; i < 8; ++i) vst1q_f64(to + 2 * i, x.pair[i]);
  }
  DAF_INLINE D widen(F a) {
    D result;
    for (int i = 0; i < 4; ++i) {
      result.pair[2 * i] = vcvt_f64_f32(vget_low_f32(a.part[i]));
      result.pair[2 * i + 1] = vcvt_high_f64_f32(a.part[i]);
    }
    return result;
  }
  DAF_INLINE D add(D a, D b) {
    for (int i = 0; i < 8; ++i) a.pair[i] = vaddq_f64(a.pair[i], b.pair[i]);
    return a;
  }
  DAF_INLINE D add_product(D sum, D x, D y) {
    for (int i = 0; i < 8; ++i) sum.pair[i] = vfmaq_f64(sum.pair[i], x.pair[i], y.pair[i]);
    return sum;
  }

  DAF_INLINE I multiply_wide(I a, uint32_t factor) {
    const uint32x4_t low = vuzp1q_u32(a.part[0], a.part[1]);
    const uint32x4_t high = vuzp1q_u32(a.part[2], a.part[3]);
    return {{product(vget_low_u32(low), factor), product(vget_high_u32(low), factor),
             product(vget_low_u32(high), factor), product(vget_high_u32(high), factor)}};
  }
  DAF_INLINE I high_words(I a) {
    return each<I>([&](int i) {
      return vreinterpretq_u32_u64(vshrq_n_u64(vreinterpretq_u64_u32(a.part[i]), 32));
    });
  }
  DAF_INLINE I exclusive_or(I a, I b, uint32_t c) { return bit_xor(bit_xor(a, b), set_integer(c)); }
  DAF_INLINE I pack_pairs(I low, I high) {
    return each<I>([&](int i) { return vtrn1q_u32(low.part[i], high.part[i]); });
  }

 private:
  DAF_INLINE uint8x16_t low_bytes(I a) {
    return vuzp1q_u8(vreinterpretq_u8_u16(low_halves(a.part[0], a.part[1])),
                     vreinterpretq_u8_u16(low_halves(a.part[2], a.part[3])));
  }
  // One bit of every byte, all ones or none.
  DAF_INLINE uint64_t bits_of_mask(Bytes mask) {
    const Bytes found = each<Bytes>([&](int i) { return vandq_u8(mask.part[i], bits_of_eight()); });
    const uint8x16_t low = vpaddq_u8(found.part[0], found.part[1]);
    const uint8x16_t high = vpaddq_u8(found.part[2], found.part[3]);
    const uint8x16_t sums = vpaddq_u8(low, high);
    return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(sums, sums)), 0);
  }
};

#undef DAF_EACH
#undef DAF_PAIRWISE

}  // namespace
