/* Normalisation by the root of the mean square, rounded where PyTorch's operations round: of a row within another part,
 * and of many rows by themselves (`baton_rms_norm`). */
#pragma once
#include "team.h"
#include "vectors.h"

/* 1 / rms(x) */
INLINE float norm_scale(const bf16 *x, int64_t n, float eps) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += 16) {
        __m512 v = widen(load16(x + i, n - i));
        sum = _mm512_fmadd_ps(v, v, sum);
    }
    return 1.0f / __builtin_sqrtf(_mm512_reduce_add_ps(sum) / (float)n + eps);
}

/* out = x / rms(x) * weight, `n` of each. */
INLINE void norm_row(const bf16 *x, const bf16 *weight, bf16 *out, int64_t n, float eps) {
    __m512 scale = _mm512_set1_ps(norm_scale(x, n, eps));
    for (int64_t i = 0; i < n; i += 16) {
        __m512 v = rounded(_mm512_mul_ps(widen(load16(x + i, n - i)), scale));
        store16(out + i, n - i, narrow(_mm512_mul_ps(v, widen(load16(weight + i, n - i)))));
    }
}

typedef struct {
    const bf16 *x, *weight;
    bf16 *out;
    int64_t rows, n, counter;
    float eps;
} Norm;

static void norm_tasks(void *arg) {
    Norm *a = arg;
    for (int64_t first; (first = 16 * take(&a->counter)) < a->rows;)
        for (int64_t r = first; r < a->rows && r < first + 16; r++)
            norm_row(a->x + r * a->n, a->weight, a->out + r * a->n, a->n, a->eps);
}

API void baton_rms_norm(const bf16 *x, const bf16 *weight, bf16 *out, int64_t rows, int64_t n, float eps, int threads) {
    Norm a = {.x = x, .weight = weight, .out = out, .rows = rows, .n = n, .eps = eps};
    parallel(norm_tasks, &a, rows > 32 ? threads : 1);
}
