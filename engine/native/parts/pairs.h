/* Rows times one panel of a packed matrix, in registers: what products and the attention of many rows are made of.
 *
 * The number of rows is known to the compiler wherever these are used, so that all sums stay in registers; each sum
 * runs over k in one order, whatever that number is.
 */
#pragma once
#include "linear.h"


/* acc[R][2] += A[R] * panel, over `pairs` pairs of k. Pair kp of row r is a[kp * a_k + r * a_r]. Asks for `lines` cache
 * lines at `ahead` with each pair, `step` bytes on from those before. */
INLINE void panel_rows(int R, int a_r, int64_t a_k, const uint32_t *a, const bf16 *panel, int64_t pairs,
                       __m512 (*acc)[2], const char *ahead, int lines, int64_t step) {
    _Pragma("GCC unroll 2") for (int64_t kp = 0; kp < pairs; kp++) {
        __m512bh w0 = (__m512bh)_mm512_loadu_si512(panel), w1 = (__m512bh)_mm512_loadu_si512(panel + 32);
        if (lines) {
            _mm_prefetch(ahead, _MM_HINT_T0);
            if (lines > 1) _mm_prefetch(ahead + 64, _MM_HINT_T0);
            ahead += step;
        }
        UNROLL for (int r = 0; r < R; r++) {
            __m512bh x = (__m512bh)_mm512_set1_epi32((int)a[kp * a_k + r * a_r]);
            acc[r][0] = _mm512_dpbf16_ps(acc[r][0], w0, x);
            acc[r][1] = _mm512_dpbf16_ps(acc[r][1], w1, x);
        }
        panel += 64;
    }
}

/* Quantised weights: whole numbers of 8 or 4 bits, exact in bfloat16, times a scale for each column and 64 k.
 *
 * 8 bits: [32][2] for each pair, as in bfloat16. 4 bits: [2][16][2] words of 16 bits for each 4 pairs, the nibble of
 * the first pair lowest; 0..15 stand for -8..7. */
#define SCALED_PAIRS 32

INLINE __m512bh whole8(const uint8_t *x) {
    __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)x)));
    __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(x + 16))));
    return _mm512_cvtne2ps_pbh(high, low);
}

/* -8..7 in bfloat16, twice: the lookup's index has one bit more than a nibble, which is the next nibble's. */
static const bf16 NIBBLES[32] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000,
                                 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
                                 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};

/* As panel_rows, over `pairs` pairs of quantised weights; pairs is a multiple of SCALED_PAIRS. */
INLINE void quantised_rows(int R, int64_t wide, int bits, const uint32_t *a, const uint8_t *panel, const float *scales,
                           int64_t pairs, __m512 (*total)[2], const char *ahead) {
    __m512i table = _mm512_loadu_si512(NIBBLES);
    for (int64_t scaled = 0; scaled < pairs; scaled += SCALED_PAIRS) {
        __m512 acc[ROWS_MAX][2];
        UNROLL for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
        for (int64_t four = 0; four < SCALED_PAIRS; four += 4) {
            __m512i x0, x1;
            if (bits == 4) {
                x0 = _mm512_loadu_si512(panel), x1 = _mm512_loadu_si512(panel + 64);
                panel += 128;
            }
            if (ahead) {
                for (int i = 0; i < (bits == 4 ? 128 : 256); i += 64) _mm_prefetch(ahead + i, _MM_HINT_T0);
                ahead += bits == 4 ? 128 : 256;
            }
            UNROLL for (int j = 0; j < 4; j++) {
                __m512bh w0, w1;
                if (bits == 4) {
                    w0 = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(x0, 4 * j), table);
                    w1 = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(x1, 4 * j), table);
                } else {
                    w0 = whole8(panel), w1 = whole8(panel + 32);
                    panel += 64;
                }
                UNROLL for (int r = 0; r < R; r++) {
                    __m512bh x = (__m512bh)_mm512_set1_epi32((int)a[j * wide + r]);
                    acc[r][0] = _mm512_dpbf16_ps(acc[r][0], w0, x);
                    acc[r][1] = _mm512_dpbf16_ps(acc[r][1], w1, x);
                }
            }
            a += 4 * wide;
        }
        __m512 s0 = _mm512_loadu_ps(scales), s1 = _mm512_loadu_ps(scales + 16);
        scales += PANEL;
        UNROLL for (int r = 0; r < R; r++) {
            total[r][0] = _mm512_fmadd_ps(acc[r][0], s0, total[r][0]);
            total[r][1] = _mm512_fmadd_ps(acc[r][1], s1, total[r][1]);
        }
    }
}
