/* bfloat16 in vectors: reading, rounding, storing, turning, and e^x. Nothing here is shared by threads. */
#pragma once
#include "base.h"

INLINE __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
INLINE __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
INLINE __m512 rounded(__m512 x) { return widen(narrow(x)); }

/* `left` elements, or all where there are more: masks only at an end. */
INLINE __m256i load16(const bf16 *x, int64_t left) {
    if (left >= 16) return _mm256_loadu_si256((const __m256i *)x);
    return _mm256_maskz_loadu_epi16((__mmask16)((1u << left) - 1), x);
}

INLINE void store16(bf16 *x, int64_t left, __m256i v) {
    if (left >= 16) _mm256_storeu_si256((__m256i *)x, v);
    else _mm256_mask_storeu_epi16(x, (__mmask16)((1u << left) - 1), v);
}

/* `left` may be 0 or less. */
INLINE __m512i load32(const bf16 *x, int64_t left) {
    if (left >= 32) return _mm512_loadu_si512(x);
    return left <= 0 ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16((1u << left) - 1, x);
}

INLINE void store32(bf16 *x, int64_t left, __m512i v) {
    if (left >= 32) _mm512_storeu_si512(x, v);
    else if (left > 0) _mm512_mask_storeu_epi16(x, (1u << left) - 1, v);
}

/* e^x for x <= 88, to a few units in the last place: 2^n times a polynomial on [-ln2/2, ln2/2] (Cephes, expf). */
INLINE __m512 exp512(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-87.0f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 8);
    x = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    x = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), x);
    __m512 y = _mm512_set1_ps(1.9875691500e-4f);
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(1.3981999507e-3f));
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(8.3334519073e-3f));
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(4.1665795894e-2f));
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(1.6666665459e-1f));
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(5.0000001201e-1f));
    y = _mm512_fmadd_ps(_mm512_mul_ps(x, x), y, _mm512_add_ps(x, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(y, n);
}

/* 16 rows of 16 words turned: row i of `v` becomes column i. */
INLINE void transpose16(__m512i *v) {
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
