/* Rows packed one by one, some in a task, where `pack_row(l, row, x)` is there: see products.h. */
#pragma once

INLINE int64_t rows_of_pack(const Linear *l) { return l->m > 32 ? 8 : 1; }

INLINE int64_t pack_tasks(const Linear *l) { return (l->m + rows_of_pack(l) - 1) / rows_of_pack(l); }

static void pack_task(const Linear *l, int64_t task) {
    int64_t first = task * rows_of_pack(l), end = first + rows_of_pack(l);
    for (int64_t row = first; row < end && row < l->m; row++) {
        const bf16 *x = l->x + row * l->x_stride;
        if (l->norm) {
            norm_row(x, l->norm, l->normed + row * l->k, l->k, l->eps);
            x = l->normed + row * l->k;
        }
        pack_row(l, row, x);
    }
}
