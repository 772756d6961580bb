/* Vectors of AVX-512 (F, BW, DQ, VL); see parts/vectors.h for what each function does. */
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#ifdef TILES
#pragma GCC target("amx-tile,amx-bf16,avx512bf16")
#endif
#ifdef PAIRS
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,bmi2,prfchw")
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,bmi2")
#endif
#include "../parts/base.h"

typedef __m512 F16;
typedef __m512i I16;
typedef __m256i B16;
typedef __mmask16 M16;

#define ROWS_MAX 12
#define HALVES 2
#define FEW_ROWS 12

INLINE void pause_core(void) { _mm_pause(); }
INLINE F16 f_zero(void) { return _mm512_setzero_ps(); }
INLINE F16 f_all(float x) { return _mm512_set1_ps(x); }
INLINE F16 f_load(const float *x) { return _mm512_loadu_ps(x); }
INLINE void f_store(float *x, F16 v) { _mm512_storeu_ps(x, v); }
INLINE F16 f_add(F16 a, F16 b) { return _mm512_add_ps(a, b); }
INLINE F16 f_sub(F16 a, F16 b) { return _mm512_sub_ps(a, b); }
INLINE F16 f_mul(F16 a, F16 b) { return _mm512_mul_ps(a, b); }
INLINE F16 f_div(F16 a, F16 b) { return _mm512_div_ps(a, b); }
INLINE F16 f_max(F16 a, F16 b) { return _mm512_max_ps(a, b); }
INLINE F16 f_fma(F16 a, F16 b, F16 c) { return _mm512_fmadd_ps(a, b, c); }
INLINE F16 f_round(F16 x) { return _mm512_roundscale_ps(x, 8); }
INLINE F16 f_times_power(F16 x, F16 n) { return _mm512_scalef_ps(x, n); }
INLINE F16 f_of_whole(I16 x) { return _mm512_cvtepi32_ps(x); }
INLINE F16 f_of_bits(I16 x) { return _mm512_castsi512_ps(x); }
INLINE float f_first(F16 x) { return _mm512_cvtss_f32(x); }
INLINE float f_sum(F16 x) { return _mm512_reduce_add_ps(x); }
INLINE float f_highest(F16 x) { return _mm512_reduce_max_ps(x); }

INLINE I16 i_load(const void *x) { return _mm512_loadu_si512(x); }
INLINE I16 i_load_halves(const void *x) { return _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)x)); }
INLINE void i_store(void *x, I16 v) { _mm512_storeu_si512(x, v); }
INLINE I16 i_zero(void) { return _mm512_setzero_si512(); }
INLINE I16 i_all(int32_t x) { return _mm512_set1_epi32(x); }
INLINE I16 i_add(I16 a, I16 b) { return _mm512_add_epi32(a, b); }
INLINE I16 i_and(I16 a, I16 b) { return _mm512_and_si512(a, b); }
INLINE I16 i_or(I16 a, I16 b) { return _mm512_or_si512(a, b); }
INLINE I16 i_shl(I16 x, unsigned n) { return _mm512_slli_epi32(x, n); }
INLINE I16 i_shr(I16 x, unsigned n) { return _mm512_srli_epi32(x, n); }
INLINE I16 i_sar(I16 x, unsigned n) { return _mm512_srai_epi32(x, n); }
INLINE int32_t i_least(I16 x) { return _mm512_reduce_min_epi32(x); }
INLINE I16 i_of_b(B16 x) { return _mm512_cvtepu16_epi32(x); }

INLINE M16 m_first(int64_t n) { return n >= 16 ? 0xffff : (M16)((1u << n) - 1); }
INLINE M16 m_none(void) { return 0; }
INLINE int m_any(M16 m) { return m != 0; }
INLINE M16 m_or(M16 a, M16 b) { return a | b; }
INLINE M16 m_and(M16 a, M16 b) { return a & b; }
INLINE M16 f_above(F16 a, F16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
INLINE M16 f_equal(F16 a, F16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
INLINE M16 f_nan(F16 a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
INLINE F16 f_pick(M16 m, F16 then, F16 other) { return _mm512_mask_mov_ps(other, m, then); }
INLINE I16 i_pick(M16 m, I16 then, I16 other) { return _mm512_mask_mov_epi32(other, m, then); }
INLINE F16 f_keep(M16 m, F16 x) { return _mm512_maskz_mov_ps(m, x); }

INLINE F16 widen(B16 x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
INLINE B16 b_load(const bf16 *x) { return _mm256_loadu_si256((const __m256i *)x); }
INLINE void b_store(bf16 *x, B16 v) { _mm256_storeu_si256((__m256i *)x, v); }
#if defined PAIRS || defined TILES
INLINE B16 narrow(F16 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
#else
/* To the nearest, ties to even; a NaN stays one. */
INLINE B16 narrow(F16 x) {
    I16 bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    I16 up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    up = _mm512_mask_mov_epi32(up, f_nan(x), _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
}
#endif

#ifdef PAIRS
INLINE F16 f_pairs(I16 a, I16 b, F16 sum) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
INLINE float f_highest_of(M16 m, F16 x) { return _mm512_mask_reduce_max_ps(m, x); }
INLINE void i_store_first(uint32_t *to, int64_t n, I16 v) { _mm512_mask_storeu_epi32(to, (M16)((1u << n) - 1), v); }

INLINE I16 pairs_low(I16 x, I16 y) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    return _mm512_permutex2var_epi16(x, low, y);
}
INLINE I16 pairs_high(I16 x, I16 y) {
    const __m512i high = _mm512_set_epi16(63, 31, 62, 30, 61, 29, 60, 28, 59, 27, 58, 26, 57, 25, 56, 24, 55, 23, 54,
                                          22, 53, 21, 52, 20, 51, 19, 50, 18, 49, 17, 48, 16);
    return _mm512_permutex2var_epi16(x, high, y);
}

INLINE I16 pairs_of_bytes(const uint8_t *x) {
    __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)x)));
    __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(x + 16))));
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

/* -8..7 in bfloat16, twice: the lookup's index has one bit more than a nibble, which is the next nibble's. */
static const bf16 NIBBLES[32] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000,
                                 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
                                 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
typedef __m512i Nibbles;
INLINE Nibbles nibbles(void) { return _mm512_loadu_si512(NIBBLES); }
INLINE I16 pairs_of_nibbles(I16 x, int j, Nibbles table) {
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(x, 4 * j), table);
}
#endif

INLINE B16 load16(const bf16 *x, int64_t left) {
    if (left >= 16) return _mm256_loadu_si256((const __m256i *)x);
    return _mm256_maskz_loadu_epi16((__mmask16)((1u << left) - 1), x);
}

INLINE void store16(bf16 *x, int64_t left, B16 v) {
    if (left >= 16) _mm256_storeu_si256((__m256i *)x, v);
    else _mm256_mask_storeu_epi16(x, (__mmask16)((1u << left) - 1), v);
}

INLINE I16 load32(const bf16 *x, int64_t left) {
    if (left >= 32) return _mm512_loadu_si512(x);
    return left <= 0 ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16((1u << left) - 1, x);
}

INLINE void store32(bf16 *x, int64_t left, I16 v) {
    if (left >= 32) _mm512_storeu_si512(x, v);
    else if (left > 0) _mm512_mask_storeu_epi16(x, (1u << left) - 1, v);
}

INLINE I16 i_joined(B16 low, B16 high) { return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); }
INLINE B16 i_low(I16 x) { return _mm512_castsi512_si256(x); }
INLINE B16 i_high(I16 x) { return _mm512_extracti64x4_epi64(x, 1); }

INLINE F16 sums16(F16 *v) {
    __m512 t[16];
    UNROLL for (int i = 0; i < 8; i++)
        t[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    UNROLL for (int i = 0; i < 4; i++)
        t[i] = _mm512_add_ps(
            _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(t[2 * i]), _mm512_castps_pd(t[2 * i + 1]))),
            _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(t[2 * i]), _mm512_castps_pd(t[2 * i + 1]))));
    __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(t[0], t[1], 0x88), _mm512_shuffle_f32x4(t[0], t[1], 0xdd));
    __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(t[2], t[3], 0x88), _mm512_shuffle_f32x4(t[2], t[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

INLINE void transpose16(I16 *v) {
    __m512i t[16];
    UNROLL for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) UNROLL for (int j = 0; j < 2; j++) {
        v[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
        v[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        __m512i a = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88), b = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
        __m512i c = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
        __m512i d = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
        t[i] = _mm512_shuffle_i32x4(a, c, 0x88);
        t[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
        t[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
    UNROLL for (int i = 0; i < 16; i++) v[i] = t[i];
}
