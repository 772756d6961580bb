/* What the attention of one layer reads and writes: queries against the keys and values in their blocks of the region,
 * where they lie. attend_few.h and attend_many.h compute it, attend.h shares it out. Nothing past a context is read:
 * blocks may hold anything there. */
#pragma once
#include "vectors.h"

#define D_MAX 256

/* The attention of one step, shared by the threads of a region. */
typedef struct {
    const bf16 *q; /* [t][q_stride], heads of d */
    bf16 *out;     /* [t][heads * d] */
    const bf16 *layer;
    const int64_t *tables, *table_at; /* block ids of all sequences; where those of sequence b start */
    const int64_t *rows_at;           /* [b + 1] first row of each sequence */
    const int64_t *contexts;          /* [b] tokens up to and with the last row's */
    const int64_t *tasks;             /* [tasks][4] sequence, its first row, number of rows, whether keys are packed */
    int64_t q_stride, heads, kv_heads, block_size, d, num_tasks, counter;
    char *scratch;
    int64_t scratch_bytes, next_scratch;
    float scale;
} Attention;

INLINE const bf16 *key_at(const Attention *a, const int64_t *table, int64_t head, int64_t position) {
    int64_t run = a->block_size * a->d;
    return a->layer + (table[position / a->block_size] * 2 * a->kv_heads + head) * run +
           position % a->block_size * a->d;
}
