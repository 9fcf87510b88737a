// What single NEON registers do, and how code is inlined on Arm; vector_neon.h is written in it.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#define DAF_INLINE static inline __attribute__((always_inline))
#define DAF_MEMBER_INLINE inline __attribute__((always_inline))
#define DAF_NEVER_INLINE __attribute__((noinline))
// A block is twice the registers, so it stays in memory: further unrolling takes more instructions
// and outgrows small processors' instruction cache.
#if defined(__clang__)
#define DAF_UNROLLED _Pragma("unroll 4")
#else
#define DAF_UNROLLED _Pragma("GCC unroll 4")
#endif

namespace {

// Not vminq: as elsewhere, the second if either is NaN.
DAF_INLINE float32x4_t least_of_four(float32x4_t a, float32x4_t b) {
  return vbslq_f32(vcltq_f32(a, b), a, b);
}

DAF_INLINE float32x4_t greatest_of_four(float32x4_t a, float32x4_t b) {
  return vbslq_f32(vcgtq_f32(a, b), a, b);
}

DAF_INLINE int16x8_t saturated(uint32x4_t low, uint32x4_t high) {
  return vqmovn_high_s32(vqmovn_s32(vreinterpretq_s32_u32(low)), vreinterpretq_s32_u32(high));
}

DAF_INLINE void sum_and_difference(int16x8_t& a, int16x8_t& b) {
  const int16x8_t sum = vaddq_s16(a, b), difference = vsubq_s16(a, b);
  a = sum;
  b = difference;
}

// The three stages within a register: each lane's partner, plus or minus itself.
DAF_INLINE int16x8_t hadamard_within(int16x8_t x) {
  x = vmlaq_s16(vrev32q_s16(x), x, int16x8_t{1, -1, 1, -1, 1, -1, 1, -1});
  const int16x8_t pairs = vreinterpretq_s16_s32(vrev64q_s32(vreinterpretq_s32_s16(x)));
  x = vmlaq_s16(pairs, x, int16x8_t{1, 1, -1, -1, 1, 1, -1, -1});
  return vmlaq_s16(vextq_s16(x, x, 4), x, int16x8_t{1, 1, 1, 1, -1, -1, -1, -1});
}

DAF_INLINE void hadamard_of_eight(int16x8_t* x) {
  for (int t = 0; t < 8; ++t) x[t] = hadamard_within(x[t]);
  for (int t = 0; t < 4; ++t) sum_and_difference(x[2 * t], x[2 * t + 1]);
  for (int t = 0; t < 4; ++t) sum_and_difference(x[t + t / 2 * 2], x[t + t / 2 * 2 + 2]);
  for (int t = 0; t < 4; ++t) sum_and_difference(x[t], x[t + 4]);
}

DAF_INLINE uint16x8_t high_halves(uint32x4_t a, uint32x4_t b) {
  return vuzp2q_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b));
}

DAF_INLINE uint16x8_t low_halves(uint32x4_t a, uint32x4_t b) {
  return vuzp1q_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b));
}

// The bits of a mask for the lanes of register i.
DAF_INLINE uint32x4_t bits_of_quad(int i) {
  const uint32_t first = 1u << 4 * i;
  return uint32x4_t{first, 2 * first, 4 * first, 8 * first};
}

DAF_INLINE uint8x16_t bits_of_eight() {
  return uint8x16_t{1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
}

// Bytes 2 i and 2 i + 1 of a word, eight times each.
DAF_INLINE uint8x16_t eight_each(int i) {
  const uint64_t first = 0x0202020202020202u * uint64_t(i);
  return vreinterpretq_u8_u64(uint64x2_t{first, first + 0x0101010101010101u});
}

DAF_INLINE uint32x4_t product(uint32x2_t a, uint32_t factor) {
  return vreinterpretq_u32_u64(vmull_n_u32(a, factor));
}

}  // namespace
