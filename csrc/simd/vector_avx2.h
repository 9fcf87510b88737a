// Sixteen lanes in two AVX2 registers (AVX2, FMA, F16C). Meanings: vector_portable.h.
#pragma once

#include "simd/x86.h"

namespace {

struct Vector {
  static constexpr int lanes = 16;
  struct F {
    __m256 low, high;
  };
  struct I {
    __m256i low, high;
  };
  using M = I;  // all ones where set

// An operation on the registers of two operands.
#define DAF_PAIRWISE(Result, name, Operand, operation)           \
  DAF_INLINE Result name(Operand a, Operand b) {                 \
    return {operation(a.low, b.low), operation(a.high, b.high)}; \
  }
// Combines all lanes by halves.
#define DAF_FOLD(name, operation)                                                             \
  DAF_INLINE float name(F a) {                                                                \
    const __m256 eight = _mm256_##operation##_ps(a.low, a.high);                              \
    const __m128 four =                                                                       \
        _mm_##operation##_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1)); \
    const __m128 two = _mm_##operation##_ps(four, _mm_movehl_ps(four, four));                 \
    return _mm_cvtss_f32(_mm_##operation##_ss(two, _mm_movehdup_ps(two)));                    \
  }
#define DAF_FOLD_INTEGERS(Result, name, operation)                                               \
  DAF_INLINE Result name(I a) {                                                                  \
    const __m256i eight = _mm256_##operation(a.low, a.high);                                     \
    const __m128i four =                                                                         \
        _mm_##operation(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));      \
    const __m128i two = _mm_##operation(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(1, 0, 3, 2))); \
    const __m128i one = _mm_##operation(two, _mm_shuffle_epi32(two, _MM_SHUFFLE(2, 3, 0, 1)));   \
    return Result(_mm_cvtsi128_si32(one));                                                       \
  }

  DAF_INLINE F load(const float* from) {
    return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)};
  }
  DAF_INLINE I load(const uint32_t* from) { return {load_eight(from), load_eight(from + 8)}; }
  DAF_INLINE void store(float* to, F x) {
    _mm256_storeu_ps(to, x.low);
    _mm256_storeu_ps(to + 8, x.high);
  }
  DAF_INLINE void store(uint32_t* to, I x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x.low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8), x.high);
  }
  DAF_INLINE void stream(float* to, F x) {
    _mm256_stream_ps(to, x.low);
    _mm256_stream_ps(to + 8, x.high);
  }
  DAF_INLINE void stream_fence() { _mm_sfence(); }
  DAF_INLINE F load_bfloat16(const uint16_t* from) {
    return as_float(shift_left<16>(
        {_mm256_cvtepu16_epi32(load_halves(from)), _mm256_cvtepu16_epi32(load_halves(from + 8))}));
  }
  DAF_INLINE void store_bfloat16(uint16_t* to, F x) {
    const I bits = as_integer(x);
    const I odd = bit_and(shift_right<16>(bits), set_integer(1));
    const I rounded = shift_right<16>(add_integer(add_integer(bits, set_integer(0x7FFF)), odd));
    const __m256i packed = in_order(_mm256_packus_epi32(rounded.low, rounded.high));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), packed);
  }
  DAF_INLINE F load_float16(const uint16_t* from) {
    return {_mm256_cvtph_ps(load_halves(from)), _mm256_cvtph_ps(load_halves(from + 8))};
  }
  DAF_INLINE void store_float16(uint16_t* to, F x) {
    store_halves(to, _mm256_cvtps_ph(x.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    store_halves(to + 8, _mm256_cvtps_ph(x.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  DAF_INLINE void prefetch(const void* from) {
    _mm_prefetch(reinterpret_cast<const char*>(from), _MM_HINT_T0);
  }

  DAF_INLINE F set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  DAF_PAIRWISE(F, add, F, _mm256_add_ps)
  DAF_PAIRWISE(F, subtract, F, _mm256_sub_ps)
  DAF_PAIRWISE(F, multiply, F, _mm256_mul_ps)
  DAF_PAIRWISE(F, least, F, _mm256_min_ps)
  DAF_PAIRWISE(F, greatest, F, _mm256_max_ps)
  DAF_INLINE F absolute(F a) { return as_float(bit_and(as_integer(a), set_integer(0x7FFFFFFF))); }
  DAF_INLINE F greatest_magnitude(F a, F b) { return greatest(a, absolute(b)); }
  DAF_FOLD(tree_sum, add)
  DAF_INLINE std::pair<float, float> tree_sums(F a, F b) {
    const __m256 first = _mm256_add_ps(a.low, a.high), second = _mm256_add_ps(b.low, b.high);
    const __m256 four = _mm256_add_ps(_mm256_permute2f128_ps(first, second, 0x20),
                                      _mm256_permute2f128_ps(first, second, 0x31));
    const __m256 two = _mm256_add_ps(four, _mm256_permute_ps(four, _MM_SHUFFLE(1, 0, 3, 2)));
    const __m256 one = _mm256_add_ps(two, _mm256_movehdup_ps(two));
    return {_mm256_cvtss_f32(one), _mm_cvtss_f32(_mm256_extractf128_ps(one, 1))};
  }
  DAF_FOLD(reduce_least, min)
  DAF_FOLD(reduce_greatest, max)

  DAF_INLINE M greater(F a, F b) { return compare<_CMP_GT_OQ>(a, b); }
  DAF_INLINE M less_equal(F a, F b) { return compare<_CMP_LE_OQ>(a, b); }
  DAF_INLINE M unordered(F a, F b) { return compare<_CMP_UNORD_Q>(a, b); }
  DAF_INLINE M mask_from(uint16_t bits) {
    const __m256i all = _mm256_set1_epi32(bits);
    const __m256i low = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i high = _mm256_slli_epi32(low, 8);
    return {_mm256_cmpeq_epi32(_mm256_and_si256(all, low), low),
            _mm256_cmpeq_epi32(_mm256_and_si256(all, high), high)};
  }
  DAF_INLINE uint16_t mask_bits(M m) {
    const int low = _mm256_movemask_ps(_mm256_castsi256_ps(m.low));
    const int high = _mm256_movemask_ps(_mm256_castsi256_ps(m.high));
    return uint16_t(low | high << 8);
  }
  DAF_PAIRWISE(M, either, M, _mm256_or_si256)
  DAF_INLINE F select(M m, F yes, F no) {
    return {_mm256_blendv_ps(no.low, yes.low, _mm256_castsi256_ps(m.low)),
            _mm256_blendv_ps(no.high, yes.high, _mm256_castsi256_ps(m.high))};
  }

  DAF_INLINE I as_integer(F a) { return {_mm256_castps_si256(a.low), _mm256_castps_si256(a.high)}; }
  DAF_INLINE F as_float(I a) { return {_mm256_castsi256_ps(a.low), _mm256_castsi256_ps(a.high)}; }
  DAF_INLINE I set_integer(uint32_t x) {
    return {_mm256_set1_epi32(int(x)), _mm256_set1_epi32(int(x))};
  }
  DAF_PAIRWISE(I, bit_and, I, _mm256_and_si256)
  DAF_INLINE I bit_and_or(I a, uint32_t mask, uint32_t more) {
    return bit_or(bit_and(a, set_integer(mask)), set_integer(more));
  }
  DAF_PAIRWISE(I, bit_or, I, _mm256_or_si256)
  DAF_PAIRWISE(I, bit_xor, I, _mm256_xor_si256)
  DAF_PAIRWISE(I, add_integer, I, _mm256_add_epi32)
  DAF_PAIRWISE(I, least_integer, I, _mm256_min_epu32)
  DAF_PAIRWISE(I, greatest_integer, I, _mm256_max_epu32)
  DAF_FOLD_INTEGERS(uint32_t, reduce_greatest, max_epu32)
  template <int places> DAF_INLINE I shift_left(I a) {
    return {_mm256_slli_epi32(a.low, places), _mm256_slli_epi32(a.high, places)};
  }
  template <int places> DAF_INLINE I shift_right(I a) {
    return {_mm256_srli_epi32(a.low, places), _mm256_srli_epi32(a.high, places)};
  }
  DAF_INLINE I truncate(F a) { return {_mm256_cvttps_epi32(a.low), _mm256_cvttps_epi32(a.high)}; }
  DAF_INLINE I round(F a) { return {_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)}; }
  DAF_INLINE F to_float(I a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
  DAF_INLINE I add_where(I a, M m, uint32_t value) {
    return bit_or(a, bit_and(m, set_integer(value)));
  }
  DAF_INLINE M any_bit(I a, uint32_t value) {
    const I bit = set_integer(value), found = bit_and(a, bit);
    return {_mm256_cmpeq_epi32(found.low, bit.low), _mm256_cmpeq_epi32(found.high, bit.high)};
  }
  DAF_INLINE F lookup(const float* table, I index) {
    const F halves = load(table);
    return {lookup_eight(halves, index.low), lookup_eight(halves, index.high)};
  }

  template <int places> DAF_INLINE I rotate_left(I a) {
    if constexpr (places == 0) return a;
    return bit_or(shift_left<places>(a), shift_right<32 - places>(a));
  }

  using Bytes = I;
  DAF_INLINE Bytes pack_bytes(const I (&quarters)[4]) {
    return {pack_bytes(quarters[0], quarters[1]), pack_bytes(quarters[2], quarters[3])};
  }
  template <int quarter> DAF_INLINE I widen_bytes(Bytes bytes) {
    const __m256i half = quarter < 2 ? bytes.low : bytes.high;
    const __m128i here = _mm256_extracti128_si256(half, quarter % 2);
    return {_mm256_cvtepu8_epi32(here), _mm256_cvtepu8_epi32(_mm_srli_si128(here, 8))};
  }
  template <int bit> DAF_INLINE uint64_t bit_of_bytes(Bytes bytes) {
    const uint32_t low = uint32_t(_mm256_movemask_epi8(_mm256_slli_epi16(bytes.low, 7 - bit)));
    const uint32_t high = uint32_t(_mm256_movemask_epi8(_mm256_slli_epi16(bytes.high, 7 - bit)));
    return uint64_t(high) << 32 | low;
  }
  DAF_INLINE Bytes no_bytes() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  template <int bit> DAF_INLINE Bytes add_bit_to_bytes(Bytes bytes, uint64_t bits) {
    const I chosen = {spread_bits(uint32_t(bits)), spread_bits(uint32_t(bits >> 32))};
    const __m256i value = _mm256_set1_epi8(char(1 << bit));
    return bit_or(bytes, bit_and(chosen, {value, value}));
  }

  DAF_INLINE Bytes set_bytes(int8_t x) { return {_mm256_set1_epi8(x), _mm256_set1_epi8(x)}; }
  DAF_INLINE Bytes load_table(const int8_t* sixteen) {
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(sixteen));
    return {_mm256_broadcastsi128_si256(table), _mm256_broadcastsi128_si256(table)};
  }
  DAF_INLINE Bytes lookup_bytes(Bytes table, Bytes index) {
    return {_mm256_shuffle_epi8(table.low, index.low), _mm256_shuffle_epi8(table.low, index.high)};
  }
  DAF_PAIRWISE(Bytes, subtract_bytes, Bytes, _mm256_sub_epi8)
  DAF_PAIRWISE(Bytes, least_bytes, Bytes, _mm256_min_epu8)
  template <int value> DAF_INLINE uint64_t add_where_greater(Bytes& sums, Bytes a, Bytes b) {
    const __m256i low = _mm256_cmpgt_epi8(a.low, b.low), high = _mm256_cmpgt_epi8(a.high, b.high);
    const Bytes all = set_bytes(value);
    sums = {_mm256_add_epi8(sums.low, _mm256_and_si256(low, all.low)),
            _mm256_add_epi8(sums.high, _mm256_and_si256(high, all.low))};
    return uint64_t(uint32_t(_mm256_movemask_epi8(high))) << 32 |
           uint32_t(_mm256_movemask_epi8(low));
  }

  struct Shorts {
    __m256i x[16];
  };
  template <int t> DAF_INLINE void put_shorts(Shorts& shorts, I low, I high) {
    shorts.x[2 * t] = in_order(_mm256_packs_epi32(low.low, low.high));
    shorts.x[2 * t + 1] = in_order(_mm256_packs_epi32(high.low, high.high));
  }
  template <int q> DAF_INLINE void put_bytes(Shorts& shorts, Bytes bytes) {
    shorts.x[4 * q] = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(bytes.low));
    shorts.x[4 * q + 1] = _mm256_cvtepi8_epi16(_mm256_extracti128_si256(bytes.low, 1));
    shorts.x[4 * q + 2] = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(bytes.high));
    shorts.x[4 * q + 3] = _mm256_cvtepi8_epi16(_mm256_extracti128_si256(bytes.high, 1));
  }
  template <int t> DAF_INLINE F shorts_to_float(const Shorts& shorts) {
    const __m256i x = shorts.x[t];
    return to_float({_mm256_cvtepi16_epi32(_mm256_castsi256_si128(x)),
                     _mm256_cvtepi16_epi32(_mm256_extracti128_si256(x, 1))});
  }
  template <int16_t multiplier, int q> DAF_INLINE Bytes narrow_shorts(const Shorts& shorts) {
    const __m256i factor = _mm256_set1_epi16(multiplier);
    __m256i x[4];
    DAF_UNROLLED for (int t = 0; t < 4; ++t) x[t] = _mm256_mulhi_epi16(shorts.x[4 * q + t], factor);
    return {in_order(_mm256_packs_epi16(x[0], x[1])), in_order(_mm256_packs_epi16(x[2], x[3]))};
  }
  DAF_INLINE void flip_shorts(Shorts& shorts, const uint32_t* signs) {
    const __m256i first = _mm256_setr_epi32(0x00010001, 0x00020002, 0x00040004, 0x00080008,
                                            0x00100010, 0x00200020, 0x00400040, 0x00800080);
    const __m256i second = _mm256_slli_epi16(first, 8);
    DAF_UNROLLED for (int t = 0; t < 8; ++t) {
      const __m256i word = _mm256_set1_epi32(int(signs[t]));
      shorts.x[2 * t] = flip_where_set(shorts.x[2 * t], word, first);
      shorts.x[2 * t + 1] = flip_where_set(shorts.x[2 * t + 1], word, second);
    }
  }
  template <int places> DAF_INLINE void shift_shorts(Shorts& shorts) {
    const __m256i half = _mm256_set1_epi16(1 << (places - 1));
    DAF_UNROLLED for (int t = 0; t < 16; ++t) shorts.x[t] =
        _mm256_srai_epi16(_mm256_add_epi16(shorts.x[t], half), places);
  }
  // Bits of an index: four of the vector, one of the 128-bit lane, three within. lanes_and_vector
  // exchanges (vector 2, lane); within_and_vector rotates (vector 1, within) by one place. After
  // two and four calls every bit is back.
  DAF_INLINE void hadamard_shorts(Shorts& shorts) {
    __m256i* x = shorts.x;
    DAF_UNROLLED for (int t = 0; t < 16; t += 4) hadamard_of_four(x + t);
    DAF_UNROLLED for (int t = 0; t < 4; ++t) {
      sum_and_difference(x[t], x[t + 4]);
      sum_and_difference(x[t + 8], x[t + 12]);
      sum_and_difference(x[t], x[t + 8]);
      sum_and_difference(x[t + 4], x[t + 12]);
    }
  }
  template <int q> DAF_INLINE I add_products(I sums, const Shorts& shorts, Bytes bytes) {
    Shorts wide;
    put_bytes<q>(wide, bytes);
    __m256i products[4];
    DAF_UNROLLED for (int t = 0; t < 4; ++t) products[t] =
        _mm256_madd_epi16(shorts.x[4 * q + t], wide.x[4 * q + t]);
    return add_integer(add_integer(sums, {products[0], products[1]}), {products[2], products[3]});
  }
  DAF_FOLD_INTEGERS(int32_t, reduce_add, add_epi32)

  // Sixteen binary64 numbers for sums. Products of widened numbers are exact: fma rounds as add.
  struct D {
    __m256d quarter[4];
  };
  DAF_INLINE D load(const double* from) {
    return {{_mm256_loadu_pd(from), _mm256_loadu_pd(from + 4), _mm256_loadu_pd(from + 8),
             _mm256_loadu_pd(from + 12)}};
  }
  DAF_INLINE void store(double* to, D x) {
    DAF_UNROLLED for (int q = 0; q < 4; ++q) _mm256_storeu_pd(to + 4 * q, x.quarter[q]);
  }
  DAF_INLINE D widen(F a) {
    return {{_mm256_cvtps_pd(_mm256_castps256_ps128(a.low)),
             _mm256_cvtps_pd(_mm256_extractf128_ps(a.low, 1)),
             _mm256_cvtps_pd(_mm256_castps256_ps128(a.high)),
             _mm256_cvtps_pd(_mm256_extractf128_ps(a.high, 1))}};
  }
  DAF_INLINE D add(D a, D b) {
    DAF_UNROLLED for (int q = 0; q < 4; ++q) a.quarter[q] =
        _mm256_add_pd(a.quarter[q], b.quarter[q]);
    return a;
  }
  DAF_INLINE D add_product(D sum, D x, D y) {
    DAF_UNROLLED for (int q = 0; q < 4; ++q) sum.quarter[q] =
        _mm256_fmadd_pd(x.quarter[q], y.quarter[q], sum.quarter[q]);
    return sum;
  }

  DAF_INLINE I multiply_wide(I a, uint32_t factor) {
    const I other = set_integer(factor);
    return {_mm256_mul_epu32(a.low, other.low), _mm256_mul_epu32(a.high, other.high)};
  }
  DAF_INLINE I high_words(I a) {
    return {_mm256_shuffle_epi32(a.low, _MM_SHUFFLE(3, 3, 1, 1)),
            _mm256_shuffle_epi32(a.high, _MM_SHUFFLE(3, 3, 1, 1))};
  }
  DAF_INLINE I exclusive_or(I a, I b, uint32_t c) { return bit_xor(bit_xor(a, b), set_integer(c)); }
  DAF_INLINE I pack_pairs(I low, I high) {
    return {_mm256_blend_epi32(low.low, _mm256_slli_epi64(high.low, 32), 0xAA),
            _mm256_blend_epi32(low.high, _mm256_slli_epi64(high.high, 32), 0xAA)};
  }

 private:
  DAF_INLINE __m256i load_eight(const uint32_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  DAF_INLINE __m128i load_halves(const uint16_t* from) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  }
  DAF_INLINE void store_halves(uint16_t* to, __m128i x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), x);
  }
  // Restores the order of 64-bit quarters after packing.
  DAF_INLINE __m256i in_order(__m256i packed) {
    return _mm256_permute4x64_epi64(packed, _MM_SHUFFLE(3, 1, 2, 0));
  }
  DAF_INLINE __m256i flip_where_set(__m256i x, __m256i word, __m256i bit) {
    const __m256i negative = _mm256_cmpeq_epi16(_mm256_and_si256(word, bit), bit);
    return _mm256_sub_epi16(_mm256_xor_si256(x, negative), negative);
  }
  DAF_INLINE void sum_and_difference(__m256i& a, __m256i& b) {
    const __m256i sum = _mm256_add_epi16(a, b), difference = _mm256_sub_epi16(a, b);
    a = sum;
    b = difference;
  }
  DAF_INLINE void within_and_vector(__m256i& a, __m256i& b) {
    const __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
    a = low;
    b = high;
    sum_and_difference(a, b);
  }
  DAF_INLINE void lanes_and_vector(__m256i& a, __m256i& b) {
    const __m256i low = _mm256_permute2x128_si256(a, b, 0x20);
    const __m256i high = _mm256_permute2x128_si256(a, b, 0x31);
    a = low;
    b = high;
    sum_and_difference(a, b);
  }
  DAF_INLINE void hadamard_of_four(__m256i* x) {
    DAF_UNROLLED for (int turn = 0; turn < 4; ++turn) {
      within_and_vector(x[0], x[1]);
      within_and_vector(x[2], x[3]);
    }
    DAF_UNROLLED for (int turn = 0; turn < 2; ++turn) {
      lanes_and_vector(x[0], x[2]);
      lanes_and_vector(x[1], x[3]);
    }
  }
  template <int predicate> DAF_INLINE M compare(F a, F b) {
    return {_mm256_castps_si256(_mm256_cmp_ps(a.low, b.low, predicate)),
            _mm256_castps_si256(_mm256_cmp_ps(a.high, b.high, predicate))};
  }
  DAF_INLINE __m256i pack_bytes(I a, I b) {
    const __m256i first = _mm256_packus_epi32(a.low, a.high);
    const __m256i second = _mm256_packus_epi32(b.low, b.high);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(first, second), order);
  }
  // Spreads 32 bits to bytes of ones or zeros.
  DAF_INLINE __m256i spread_bits(uint32_t bits) {
    const __m256i source =
        _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i each = _mm256_set1_epi64x(int64_t(0x8040201008040201));
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(int(bits)), source);
    return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, each), each);
  }
  // The permutation reads three bits of the index, the blend the fourth.
  DAF_INLINE __m256 lookup_eight(F table, __m256i index) {
    const __m256 fourth = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, index),
                            _mm256_permutevar8x32_ps(table.high, index), fourth);
  }
};

#undef DAF_PAIRWISE
#undef DAF_FOLD
#undef DAF_FOLD_INTEGERS

}  // namespace
