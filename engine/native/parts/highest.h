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
    static const int32_t LANES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t row; (row = take(&a->counter)) < a->rows;) {
        const bf16 *x = a->x + row * a->n;
        F16 best = f_all(-__builtin_inff());
        I16 lanes = i_load(LANES), where = i_all(INT32_MAX);
        M16 nan = m_none();
        for (int64_t i = 0; i < a->n; i += 16) {
            M16 mask = m_first(a->n - i);
            F16 v = widen(load16(x + i, a->n - i));
            M16 higher = m_and(mask, f_above(v, best));
            best = f_pick(higher, v, best);
            nan = m_or(nan, m_and(mask, f_nan(v)));
            where = i_pick(higher, i_add(lanes, i_all((int32_t)i)), where);
        }
        int64_t found = i_least(i_pick(f_equal(best, f_all(f_highest(best))), where, i_all(INT32_MAX)));
        a->out[row] = !m_any(nan) && found < a->n ? found : -1;
    }
}

/* out[r] = the first column of row r whose value is the row's highest; -1 where one is NaN or none is above minus
 * infinity. */
API void baton_highest(const bf16 *x, int64_t *out, int64_t rows, int64_t n, int threads) {
    Highest a = {.x = x, .out = out, .rows = rows, .n = n};
    parallel(highest_tasks, &a, rows > 1 ? threads : 1);
}
