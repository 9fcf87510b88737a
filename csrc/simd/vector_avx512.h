// Sixteen lanes in one AVX-512 register (F, BW, DQ, VL). Meanings: vector_portable.h.
#pragma once

#include "simd/x86.h"

namespace {

struct Vector {
  static constexpr int lanes = 16;
  using F = __m512;
  using I = __m512i;
  using M = __mmask16;

  DAF_INLINE F load(const float* from) { return _mm512_loadu_ps(from); }
  DAF_INLINE I load(const uint32_t* from) { return _mm512_loadu_si512(from); }
  DAF_INLINE void store(float* to, F x) { _mm512_storeu_ps(to, x); }
  DAF_INLINE void store(uint32_t* to, I x) { _mm512_storeu_si512(to, x); }
  DAF_INLINE void stream(float* to, F x) { _mm512_stream_ps(to, x); }
  DAF_INLINE void stream_fence() { _mm_sfence(); }
  DAF_INLINE F load_bfloat16(const uint16_t* from) {
    const I wide = _mm512_cvtepu16_epi32(load_halves(from));
    return as_float(_mm512_slli_epi32(wide, 16));
  }
  DAF_INLINE void store_bfloat16(uint16_t* to, F x) {
    const I bits = as_integer(x);
    const I odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const I rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    store_halves(to, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  }
  DAF_INLINE F load_float16(const uint16_t* from) { return _mm512_cvtph_ps(load_halves(from)); }
  DAF_INLINE void store_float16(uint16_t* to, F x) {
    store_halves(to, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  DAF_INLINE void prefetch(const void* from) {
    _mm_prefetch(reinterpret_cast<const char*>(from), _MM_HINT_T0);
  }

  DAF_INLINE F set(float x) { return _mm512_set1_ps(x); }
  DAF_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
  DAF_INLINE F subtract(F a, F b) { return _mm512_sub_ps(a, b); }
  DAF_INLINE F multiply(F a, F b) { return _mm512_mul_ps(a, b); }
  DAF_INLINE F least(F a, F b) { return _mm512_min_ps(a, b); }
  DAF_INLINE F greatest(F a, F b) { return _mm512_max_ps(a, b); }
  DAF_INLINE F greatest_magnitude(F a, F b) {
    constexpr int greater_magnitude = 3, sign_cleared = 2 << 2;
    return _mm512_range_ps(a, b, greater_magnitude | sign_cleared);
  }
  DAF_INLINE float tree_sum(F a) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  DAF_INLINE std::pair<float, float> tree_sums(F a, F b) {
    const __m256 first = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)),
                 second = _mm256_add_ps(_mm512_castps512_ps256(b), _mm512_extractf32x8_ps(b, 1));
    const __m256 four = _mm256_add_ps(_mm256_permute2f128_ps(first, second, 0x20),
                                      _mm256_permute2f128_ps(first, second, 0x31));
    const __m256 two = _mm256_add_ps(four, _mm256_permute_ps(four, _MM_SHUFFLE(1, 0, 3, 2)));
    const __m256 one = _mm256_add_ps(two, _mm256_movehdup_ps(two));
    return {_mm256_cvtss_f32(one), _mm_cvtss_f32(_mm256_extractf128_ps(one, 1))};
  }
  DAF_INLINE float reduce_least(F a) { return _mm512_reduce_min_ps(a); }
  DAF_INLINE float reduce_greatest(F a) { return _mm512_reduce_max_ps(a); }

  DAF_INLINE M greater(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
  DAF_INLINE M less_equal(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
  DAF_INLINE M unordered(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
  DAF_INLINE M mask_from(uint16_t bits) { return bits; }
  DAF_INLINE uint16_t mask_bits(M m) { return m; }
  DAF_INLINE M either(M a, M b) { return _kor_mask16(a, b); }
  DAF_INLINE F select(M m, F yes, F no) { return _mm512_mask_blend_ps(m, no, yes); }

  DAF_INLINE I as_integer(F a) { return _mm512_castps_si512(a); }
  DAF_INLINE F as_float(I a) { return _mm512_castsi512_ps(a); }
  DAF_INLINE I set_integer(uint32_t x) { return _mm512_set1_epi32(int(x)); }
  DAF_INLINE I bit_and(I a, I b) { return _mm512_and_si512(a, b); }
  DAF_INLINE I bit_and_or(I a, uint32_t mask, uint32_t more) {
    return _mm512_ternarylogic_epi32(a, set_integer(mask), set_integer(more), 0xEA);
  }
  DAF_INLINE I bit_xor(I a, I b) { return _mm512_xor_si512(a, b); }
  DAF_INLINE I add_integer(I a, I b) { return _mm512_add_epi32(a, b); }
  DAF_INLINE I least_integer(I a, I b) { return _mm512_min_epu32(a, b); }
  DAF_INLINE I greatest_integer(I a, I b) { return _mm512_max_epu32(a, b); }
  DAF_INLINE uint32_t reduce_greatest(I a) { return _mm512_reduce_max_epu32(a); }
  template <int places> DAF_INLINE I shift_left(I a) { return _mm512_slli_epi32(a, places); }
  DAF_INLINE I truncate(F a) { return _mm512_cvttps_epi32(a); }
  DAF_INLINE I round(F a) { return _mm512_cvtps_epi32(a); }
  DAF_INLINE F to_float(I a) { return _mm512_cvtepi32_ps(a); }
  DAF_INLINE I add_where(I a, M m, uint32_t value) {
    return _mm512_mask_or_epi32(a, m, a, set_integer(value));
  }
  DAF_INLINE M any_bit(I a, uint32_t value) {
    return _mm512_test_epi32_mask(a, set_integer(value));
  }
  DAF_INLINE F lookup(const float* table, I index) {
    return _mm512_permutexvar_ps(index, _mm512_loadu_ps(table));
  }

  template <int places> DAF_INLINE I rotate_left(I a) { return _mm512_rol_epi32(a, places); }

  using Bytes = __m512i;
  DAF_INLINE Bytes pack_bytes(const I (&quarters)[4]) {
    const I low = _mm512_packus_epi32(quarters[0], quarters[1]);
    const I high = _mm512_packus_epi32(quarters[2], quarters[3]);
    const I order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, _mm512_packus_epi16(low, high));
  }
  template <int quarter> DAF_INLINE I widen_bytes(Bytes bytes) {
    return _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(bytes, quarter));
  }
  template <int bit> DAF_INLINE uint64_t bit_of_bytes(Bytes bytes) {
    return _mm512_test_epi8_mask(bytes, _mm512_set1_epi8(char(1 << bit)));
  }
  DAF_INLINE Bytes no_bytes() { return _mm512_setzero_si512(); }
  template <int bit> DAF_INLINE Bytes add_bit_to_bytes(Bytes bytes, uint64_t bits) {
    const I value = _mm512_or_si512(bytes, _mm512_set1_epi8(char(1 << bit)));
    return _mm512_mask_mov_epi8(bytes, bits, value);
  }

  DAF_INLINE Bytes set_bytes(int8_t x) { return _mm512_set1_epi8(x); }
  DAF_INLINE Bytes load_table(const int8_t* sixteen) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(sixteen)));
  }
  DAF_INLINE Bytes lookup_bytes(Bytes table, Bytes index) {
    return _mm512_shuffle_epi8(table, index);
  }
  DAF_INLINE Bytes subtract_bytes(Bytes a, Bytes b) { return _mm512_sub_epi8(a, b); }
  DAF_INLINE Bytes least_bytes(Bytes a, Bytes b) { return _mm512_min_epu8(a, b); }
  template <int value> DAF_INLINE uint64_t add_where_greater(Bytes& sums, Bytes a, Bytes b) {
    const __mmask64 greater = _mm512_cmpgt_epi8_mask(a, b);
    sums = _mm512_mask_add_epi8(sums, greater, sums, _mm512_set1_epi8(value));
    return greater;
  }

  struct Shorts {
    __m512i x[8];
  };
  template <int t> DAF_INLINE void put_shorts(Shorts& shorts, I low, I high) {
    const I order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    shorts.x[t] = _mm512_permutexvar_epi64(order, _mm512_packs_epi32(low, high));
  }
  template <int q> DAF_INLINE void put_bytes(Shorts& shorts, Bytes bytes) {
    shorts.x[2 * q] = _mm512_cvtepi8_epi16(_mm512_castsi512_si256(bytes));
    shorts.x[2 * q + 1] = _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64(bytes, 1));
  }
  template <int t> DAF_INLINE F shorts_to_float(const Shorts& shorts) {
    const __m256i half = _mm512_extracti64x4_epi64(shorts.x[t / 2], t % 2);
    return _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(half));
  }
  template <int16_t multiplier, int q> DAF_INLINE Bytes narrow_shorts(const Shorts& shorts) {
    const I factor = _mm512_set1_epi16(multiplier);
    const I low = _mm512_mulhi_epi16(shorts.x[2 * q], factor);
    const I high = _mm512_mulhi_epi16(shorts.x[2 * q + 1], factor);
    const I order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    return _mm512_permutexvar_epi64(order, _mm512_packs_epi16(low, high));
  }
  DAF_INLINE void flip_shorts(Shorts& shorts, const uint32_t* signs) {
    const I bit =
        _mm512_set_epi32(int(0x80008000), 0x40004000, 0x20002000, 0x10001000, 0x08000800,
                         0x04000400, 0x02000200, 0x01000100, 0x00800080, 0x00400040, 0x00200020,
                         0x00100010, 0x00080008, 0x00040004, 0x00020002, 0x00010001);
    DAF_UNROLLED for (int t = 0; t < 8; ++t) {
      const __mmask32 negative = _mm512_test_epi16_mask(set_integer(signs[t]), bit);
      shorts.x[t] =
          _mm512_mask_sub_epi16(shorts.x[t], negative, _mm512_setzero_si512(), shorts.x[t]);
    }
  }
  template <int places> DAF_INLINE void shift_shorts(Shorts& shorts) {
    const I half = _mm512_set1_epi16(1 << (places - 1));
    DAF_UNROLLED for (int t = 0; t < 8; ++t) shorts.x[t] =
        _mm512_srai_epi16(_mm512_add_epi16(shorts.x[t], half), places);
  }
  // Bits of an index: three of the vector, two of the 128-bit lane, three within. lanes_and_vector
  // rotates (vector 2, lane) by one place, within_and_vector (vector 1, within). After three and
  // four calls every bit has been transformed and is back.
  DAF_INLINE void hadamard_shorts(Shorts& shorts) {
    I* x = shorts.x;
    DAF_UNROLLED for (int turn = 0; turn < 4; ++turn) {
      DAF_UNROLLED for (int t = 0; t < 8; t += 2) within_and_vector(x[t], x[t + 1]);
    }
    DAF_UNROLLED for (int turn = 0; turn < 3; ++turn) {
      DAF_UNROLLED for (int t = 0; t < 8; ++t) if (!(t & 2)) lanes_and_vector(x[t], x[t + 2]);
    }
    DAF_UNROLLED for (int t = 0; t < 4; ++t) sum_and_difference(x[t], x[t + 4]);
  }
  template <int q> DAF_INLINE I add_products(I sums, const Shorts& shorts, Bytes bytes) {
    Shorts wide;
    put_bytes<q>(wide, bytes);
    const I low = _mm512_madd_epi16(shorts.x[2 * q], wide.x[2 * q]);
    const I high = _mm512_madd_epi16(shorts.x[2 * q + 1], wide.x[2 * q + 1]);
    return _mm512_add_epi32(sums, _mm512_add_epi32(low, high));
  }
  DAF_INLINE int32_t reduce_add(I a) { return _mm512_reduce_add_epi32(a); }

  // Sixteen binary64 numbers for sums. Products of widened numbers are exact: fma rounds as add.
  struct D {
    __m512d low, high;
  };
  DAF_INLINE D load(const double* from) {
    return {_mm512_loadu_pd(from), _mm512_loadu_pd(from + 8)};
  }
  DAF_INLINE void store(double* to, D x) {
    _mm512_storeu_pd(to, x.low);
    _mm512_storeu_pd(to + 8, x.high);
  }
  DAF_INLINE D widen(F a) {
    return {_mm512_cvtps_pd(_mm512_castps512_ps256(a)),
            _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1))};
  }
  DAF_INLINE D add(D a, D b) {
    return {_mm512_add_pd(a.low, b.low), _mm512_add_pd(a.high, b.high)};
  }
  DAF_INLINE D add_product(D sum, D x, D y) {
    return {_mm512_fmadd_pd(x.low, y.low, sum.low), _mm512_fmadd_pd(x.high, y.high, sum.high)};
  }

  DAF_INLINE I multiply_wide(I a, uint32_t factor) {
    return _mm512_mul_epu32(a, set_integer(factor));
  }
  DAF_INLINE I high_words(I a) { return _mm512_shuffle_epi32(a, _MM_PERM_DDBB); }
  DAF_INLINE I exclusive_or(I a, I b, uint32_t c) {
    return _mm512_ternarylogic_epi32(a, b, set_integer(c), 0x96);
  }
  DAF_INLINE I pack_pairs(I low, I high) {
    return _mm512_mask_shuffle_epi32(low, 0xAAAA, high, _MM_PERM_CCAA);
  }

 private:
  DAF_INLINE __m256i load_halves(const uint16_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  DAF_INLINE void store_halves(uint16_t* to, __m256i x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x);
  }
  DAF_INLINE void sum_and_difference(I& a, I& b) {
    const I sum = _mm512_add_epi16(a, b), difference = _mm512_sub_epi16(a, b);
    a = sum;
    b = difference;
  }
  DAF_INLINE void within_and_vector(I& a, I& b) {
    const I low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
    a = low;
    b = high;
    sum_and_difference(a, b);
  }
  DAF_INLINE void lanes_and_vector(I& a, I& b) {
    const I even = _mm512_shuffle_i32x4(a, b, _MM_SHUFFLE(2, 0, 2, 0));
    const I odd = _mm512_shuffle_i32x4(a, b, _MM_SHUFFLE(3, 1, 3, 1));
    a = even;
    b = odd;
    sum_and_difference(a, b);
  }
};

}  // namespace
