/* The highest score of each row: greedy decoding, over a vocabulary of scores that are only read. */
#pragma once
#include "team.h"
#include "vectors.h"

typedef struct {
    const bf16 *x;
    int64_t *out;
    int64_t rows, n, counter;
} Highest;

static void highest_tasks(void *arg) {
    Highest *a = arg;
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (int64_t row; (row = take(&a->counter)) < a->rows;) {
        const bf16 *x = a->x + row * a->n;
        __m512 best = _mm512_set1_ps(-__builtin_inff());
        __m512i where = _mm512_set1_epi32(INT32_MAX);
        __mmask16 nan = 0;
        for (int64_t i = 0; i < a->n; i += 16) {
            __mmask16 mask = a->n - i >= 16 ? 0xffff : (__mmask16)((1u << (a->n - i)) - 1);
            __m512 v = widen(load16(x + i, a->n - i));
            __mmask16 higher = _mm512_mask_cmp_ps_mask(mask, v, best, _CMP_GT_OQ);
            best = _mm512_mask_mov_ps(best, higher, v);
            nan |= _mm512_mask_cmp_ps_mask(mask, v, v, _CMP_UNORD_Q);
            where = _mm512_mask_mov_epi32(where, higher, _mm512_add_epi32(lanes, _mm512_set1_epi32((int)i)));
        }
        __mmask16 top = _mm512_cmp_ps_mask(best, _mm512_set1_ps(_mm512_reduce_max_ps(best)), _CMP_EQ_OQ);
        int64_t found = _mm512_mask_reduce_min_epi32(top, where);
        a->out[row] = !nan && found < a->n ? found : -1;
    }
}

/* out[r] = the first column of row r whose value is the row's highest; -1 where one is NaN or none is above minus
 * infinity. */
API void baton_highest(const bf16 *x, int64_t *out, int64_t rows, int64_t n, int threads) {
    Highest a = {.x = x, .out = out, .rows = rows, .n = n};
    parallel(highest_tasks, &a, rows > 1 ? threads : 1);
}
