/* Attention of one layer shared out: a task is some rows of one sequence and one KV head, computed in the way that the
 * plan has chosen for them. Threads take one task ahead, so as to ask for its memory; each has a part of `scratch` of
 * its own. */
#pragma once
#include "attend_few.h"
#include "attend_many.h"
#include "team.h"

#define MANY(NAME, D)                                                                                           \
    static __attribute__((noinline)) void NAME(const Attention *a, const int64_t *task, int64_t head, char *scratch) { \
        attend_many(a, task[0], task[1], task[2], head, scratch, D);                                            \
    }
MANY(many_of_64, 64)
MANY(many_of_128, 128)
MANY(many_of_any, a->d)

static void attention_tasks(void *arg) {
    Attention *a = arg;
    char *scratch = a->scratch + take(&a->next_scratch) * a->scratch_bytes;
    int64_t tasks = a->num_tasks * a->kv_heads;
    for (int64_t task = take(&a->counter), after; task < tasks; task = after) {
        after = take(&a->counter);
        const int64_t *t = a->tasks + task / a->kv_heads * 4, *n = a->tasks + after / a->kv_heads * 4;
        int64_t head = task % a->kv_heads;
        if (t[3]) {
            switch (a->d) { /* two sizes known to the compiler */
                case 64: many_of_64(a, t, head, scratch); break;
                case 128: many_of_128(a, t, head, scratch); break;
                default: many_of_any(a, t, head, scratch);
            }
            continue;
        }
        Reading next;
        if (after < tasks)
            next = (Reading){a->tables + a->table_at[n[0]], after % a->kv_heads, a->contexts[n[0]]};
        attend_few(a, t[0], t[1], t[2], head, after < tasks ? &next : NULL);
    }
}

/* Bytes that each thread needs for contexts of up to `context` tokens. */
API int64_t baton_attention_scratch(int64_t context, int64_t d) {
    int64_t padded = (context + 31) / 32 * 32, wide = (d + 31) / 32 * 32;
    return ((int64_t)sizeof(Tile) + 64 + padded * (d + wide) * (int64_t)sizeof(Packed) + 4095) / 4096 * 4096;
}

API void baton_attention(const bf16 *q, int64_t q_stride, bf16 *out, const bf16 *layer, const int64_t *tables,
                         const int64_t *table_at, const int64_t *rows_at, const int64_t *contexts, const int64_t *tasks,
                         int64_t num_tasks, int64_t heads, int64_t kv_heads, int64_t block_size, int64_t d, float scale,
                         char *scratch, int64_t scratch_bytes, int threads) {
    Attention a = {.q = q, .q_stride = q_stride, .out = out, .layer = layer, .tables = tables, .table_at = table_at,
                   .rows_at = rows_at, .contexts = contexts, .tasks = tasks, .num_tasks = num_tasks, .heads = heads,
                   .kv_heads = kv_heads, .block_size = block_size, .d = d, .scale = scale, .scratch = scratch,
                   .scratch_bytes = scratch_bytes};
    parallel(attention_tasks, &a, threads);
}
