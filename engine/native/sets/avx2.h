/* Vectors of AVX2 with FMA, two registers for each; see parts/vectors.h for what each function does. */
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#pragma GCC target("avx2,fma,bmi2")
#include "../parts/base.h"

typedef struct {
    __m256 a, b;
} F16;
typedef struct {
    __m256i a, b;
} I16;
typedef __m256i B16;
typedef I16 M16; /* a lane is all ones or zero */

#define ROWS_MAX 6 /* times two registers, and one for the weights' half, one for x: 15 of 16 */
#define HALVES 1
#define FEW_ROWS 2

#define EACH1(TYPE, F) ((TYPE){F(x.a), F(x.b)})
#define EACH2(TYPE, F) ((TYPE){F(x.a, y.a), F(x.b, y.b)})

INLINE void pause_core(void) { _mm_pause(); }
INLINE F16 f_zero(void) { return (F16){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE F16 f_all(float x) { return (F16){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE F16 f_load(const float *x) { return (F16){_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)}; }
INLINE void f_store(float *x, F16 v) { _mm256_storeu_ps(x, v.a), _mm256_storeu_ps(x + 8, v.b); }
INLINE F16 f_add(F16 x, F16 y) { return EACH2(F16, _mm256_add_ps); }
INLINE F16 f_sub(F16 x, F16 y) { return EACH2(F16, _mm256_sub_ps); }
INLINE F16 f_mul(F16 x, F16 y) { return EACH2(F16, _mm256_mul_ps); }
INLINE F16 f_div(F16 x, F16 y) { return EACH2(F16, _mm256_div_ps); }
INLINE F16 f_max(F16 x, F16 y) { return EACH2(F16, _mm256_max_ps); }
INLINE F16 f_fma(F16 x, F16 y, F16 z) {
    return (F16){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
INLINE F16 f_round(F16 x) { return (F16){_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
INLINE __m256 power8(__m256 n) { /* 2^n for whole n from -126 to 127, 0 below, infinity above */
    n = _mm256_min_ps(_mm256_max_ps(n, _mm256_set1_ps(-127.0f)), _mm256_set1_ps(128.0f));
    __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
INLINE F16 f_times_power(F16 x, F16 n) {
    return (F16){_mm256_mul_ps(x.a, power8(n.a)), _mm256_mul_ps(x.b, power8(n.b))};
}
INLINE F16 f_of_whole(I16 x) { return EACH1(F16, _mm256_cvtepi32_ps); }
INLINE F16 f_of_bits(I16 x) { return EACH1(F16, _mm256_castsi256_ps); }
INLINE float f_first(F16 x) { return _mm256_cvtss_f32(x.a); }
INLINE float f_sum(F16 x) {
    __m256 y = _mm256_add_ps(x.a, x.b);
    __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_add_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
}
INLINE float f_highest(F16 x) {
    __m256 y = _mm256_max_ps(x.a, x.b);
    __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_max_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_max_ss(z, _mm_movehdup_ps(z)));
}

INLINE I16 i_load(const void *x) {
    return (I16){_mm256_loadu_si256((const __m256i *)x), _mm256_loadu_si256((const __m256i *)x + 1)};
}
INLINE I16 i_load_halves(const void *x) {
    return (I16){_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)x)),
                 _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)x + 1))};
}
INLINE void i_store(void *x, I16 v) {
    _mm256_storeu_si256((__m256i *)x, v.a), _mm256_storeu_si256((__m256i *)x + 1, v.b);
}
INLINE I16 i_zero(void) { return (I16){_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE I16 i_all(int32_t x) { return (I16){_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE I16 i_add(I16 x, I16 y) { return EACH2(I16, _mm256_add_epi32); }
INLINE I16 i_and(I16 x, I16 y) { return EACH2(I16, _mm256_and_si256); }
INLINE I16 i_or(I16 x, I16 y) { return EACH2(I16, _mm256_or_si256); }
INLINE I16 i_shl(I16 x, int n) { return (I16){_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)}; }
INLINE I16 i_shr(I16 x, int n) { return (I16){_mm256_srli_epi32(x.a, n), _mm256_srli_epi32(x.b, n)}; }
INLINE I16 i_sar(I16 x, int n) { return (I16){_mm256_srai_epi32(x.a, n), _mm256_srai_epi32(x.b, n)}; }
INLINE int32_t i_least(I16 x) {
    __m256i y = _mm256_min_epi32(x.a, x.b);
    __m128i z = _mm_min_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
    z = _mm_min_epi32(z, _mm_shuffle_epi32(z, 0x4e));
    return _mm_cvtsi128_si32(_mm_min_epi32(z, _mm_shuffle_epi32(z, 0xb1)));
}
INLINE I16 i_of_b(B16 x) {
    return (I16){_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)),
                 _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1))};
}

static const int32_t FIRST[32] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
INLINE M16 m_first(int64_t n) { return i_load(FIRST + 16 - (n < 16 ? n : 16)); }
INLINE M16 m_none(void) { return i_zero(); }
INLINE int m_any(M16 m) {
    __m256i either = _mm256_or_si256(m.a, m.b);
    return !_mm256_testz_si256(either, either);
}
INLINE M16 m_or(M16 x, M16 y) { return i_or(x, y); }
INLINE M16 m_and(M16 x, M16 y) { return i_and(x, y); }
#define COMPARED(HOW)                                                   \
    ((M16){_mm256_castps_si256(_mm256_cmp_ps(x.a, y.a, HOW)), _mm256_castps_si256(_mm256_cmp_ps(x.b, y.b, HOW))})
INLINE M16 f_above(F16 x, F16 y) { return COMPARED(_CMP_GT_OQ); }
INLINE M16 f_equal(F16 x, F16 y) { return COMPARED(_CMP_EQ_OQ); }
INLINE M16 f_nan(F16 x) {
    F16 y = x;
    return COMPARED(_CMP_UNORD_Q);
}
INLINE I16 i_pick(M16 m, I16 x, I16 y) {
    return (I16){_mm256_blendv_epi8(y.a, x.a, m.a), _mm256_blendv_epi8(y.b, x.b, m.b)};
}
INLINE F16 f_pick(M16 m, F16 x, F16 y) {
    return (F16){_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(m.a)),
                 _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(m.b))};
}
INLINE F16 f_keep(M16 m, F16 x) {
    return (F16){_mm256_and_ps(x.a, _mm256_castsi256_ps(m.a)), _mm256_and_ps(x.b, _mm256_castsi256_ps(m.b))};
}

INLINE F16 widen(B16 x) { return f_of_bits(i_shl(i_of_b(x), 16)); }
INLINE B16 b_load(const bf16 *x) { return _mm256_loadu_si256((const __m256i *)x); }
INLINE void b_store(bf16 *x, B16 v) { _mm256_storeu_si256((__m256i *)x, v); }
/* To the nearest, ties to even; a NaN stays one. */
INLINE __m256i narrow8(__m256 x) {
    __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc00000), nan), 16);
}
INLINE B16 narrow(F16 x) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(narrow8(x.a), narrow8(x.b)), 0xd8);
}

/* At an end, seldom enough for a call. */
static __attribute__((noinline)) B16 load_part(const bf16 *x, int64_t left) {
    bf16 part[16] = {0};
    for (int i = 0; i < 16; i++)
        if (i < left) part[i] = x[i];
    return b_load(part);
}

static __attribute__((noinline)) void store_part(bf16 *x, int64_t left, B16 v) {
    bf16 part[16];
    b_store(part, v);
    for (int i = 0; i < 16; i++)
        if (i < left) x[i] = part[i];
}

INLINE B16 load16(const bf16 *x, int64_t left) { return left >= 16 ? b_load(x) : load_part(x, left); }

INLINE void store16(bf16 *x, int64_t left, B16 v) {
    if (left >= 16) b_store(x, v);
    else store_part(x, left, v);
}

INLINE I16 load32(const bf16 *x, int64_t left) {
    if (left >= 32) return i_load(x);
    return (I16){load16(x, left), load16(x + 16, left - 16)};
}

INLINE void store32(bf16 *x, int64_t left, I16 v) {
    store16(x, left, v.a);
    store16(x + 16, left - 16, v.b);
}

INLINE I16 i_joined(B16 low, B16 high) { return (I16){low, high}; }
INLINE B16 i_low(I16 x) { return x.a; }
INLINE B16 i_high(I16 x) { return x.b; }

INLINE __m256 sums8(const F16 *v) {
    __m256 t[4];
    UNROLL for (int i = 0; i < 4; i++)
        t[i] = _mm256_hadd_ps(_mm256_add_ps(v[2 * i].a, v[2 * i].b), _mm256_add_ps(v[2 * i + 1].a, v[2 * i + 1].b));
    __m256 x = _mm256_hadd_ps(t[0], t[1]), y = _mm256_hadd_ps(t[2], t[3]);
    return _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
}
INLINE F16 sums16(F16 *v) { return (F16){sums8(v), sums8(v + 8)}; }

INLINE void transpose8(__m256i *v) {
    __m256i t[8];
    UNROLL for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(v[i], v[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(v[i], v[i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 4) UNROLL for (int j = 0; j < 2; j++) {
        v[i + 2 * j] = _mm256_unpacklo_epi64(t[i + j], t[i + j + 2]);
        v[i + 2 * j + 1] = _mm256_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2x128_si256(v[i], v[i + 4], 0x20);
        t[i + 4] = _mm256_permute2x128_si256(v[i], v[i + 4], 0x31);
    }
    UNROLL for (int i = 0; i < 8; i++) v[i] = t[i];
}

INLINE void transpose16(I16 *v) {
    __m256i t[4][8]; /* rows 0..7 and 8..15, first and second half of each */
    UNROLL for (int i = 0; i < 8; i++) t[0][i] = v[i].a, t[1][i] = v[i].b, t[2][i] = v[i + 8].a, t[3][i] = v[i + 8].b;
    UNROLL for (int i = 0; i < 4; i++) transpose8(t[i]);
    UNROLL for (int i = 0; i < 8; i++) v[i] = (I16){t[0][i], t[2][i]}, v[i + 8] = (I16){t[1][i], t[3][i]};
}
