/* Normalisation by the root of the mean square, rounded where PyTorch's operations round: of a row within another part,
 * and of many rows by themselves (`baton_rms_norm`). */
#pragma once
#include "team.h"
#include "vectors.h"

/* 1 / rms(x) */
INLINE float norm_scale(const bf16 *x, int64_t n, float eps) {
    F16 sum = f_zero();
    for (int64_t i = 0; i < n; i += 16) {
        F16 v = widen(load16(x + i, n - i));
        sum = f_fma(v, v, sum);
    }
    return 1.0f / __builtin_sqrtf(f_sum(sum) / (float)n + eps);
}

/* out = x / rms(x) * weight, `n` of each. */
INLINE void norm_row(const bf16 *x, const bf16 *weight, bf16 *out, int64_t n, float eps) {
    F16 scale = f_all(norm_scale(x, n, eps));
    for (int64_t i = 0; i < n; i += 16) {
        F16 v = rounded(f_mul(widen(load16(x + i, n - i)), scale));
        store16(out + i, n - i, narrow(f_mul(v, widen(load16(weight + i, n - i)))));
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
