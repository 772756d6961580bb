/* A step through decoder layers: all of them in one parallel region where nobody waits for keys and values
 * (`baton_layers`), or each in two calls, between which they can be sent on (`baton_layer_open`, `baton_layer_close`).
 * The bits are the same.
 *
 * Where one part reads what another has written, the team meets between them: `multiply` does so when it begins, and
 * the calls of `meet` here are those before parts that are no products. A step's buffers belong to one call at a time.
 */
#pragma once
#include "attend.h"
#include "products.h"
#include "records.h"

/* Operand, Layer and Step are those of engine/models/native_decoder.py, field by field. */
typedef struct {
    const uint8_t *panels;
    const float *scales;
    const bf16 *bias;
    int64_t bits, columns, inputs;
} Operand;

typedef struct {
    const bf16 *input_norm, *q_norm, *k_norm, *attended_norm;
    Operand qkv, o, gate_up, down;
} Layer;

typedef struct {
    bf16 *x, *normed, *qkv, *attended, *gated;
    const bf16 *cosines, *sines;
    const int64_t *tables, *table_at, *rows_at, *contexts, *tasks, *blocks, *slots;
    uint32_t *product_scratch;
    char *attention_scratch;
    int64_t rows, hidden, num_tasks, heads, kv_heads, block_size, d, attention_scratch_bytes, threads;
    double eps, scale;
} Step;

/* One layer of a step, shared by the threads of a region. */
typedef struct {
    Linear qkv, o, gate_up, down;
    Store store;
    Attention attention;
} Parts;

static Linear part_of(const Operand *o, const bf16 *x, const bf16 *norm, bf16 *out, int64_t stride, int epilogue,
                      const Step *s) {
    Linear l = linear_of(x, o->inputs, o->panels, o->scales, (int)o->bits, o->bias, out, stride, s->rows, o->columns,
                         o->inputs, epilogue, s->product_scratch);
    l.norm = norm, l.normed = s->normed, l.eps = (float)s->eps;
    return l;
}

static Parts parts_of(const Layer *l, const Step *s, bf16 *region) {
    return (Parts){
        .qkv = part_of(&l->qkv, s->x, l->input_norm, s->qkv, l->qkv.columns, EPILOGUE_STORE, s),
        .o = part_of(&l->o, s->attended, NULL, s->x, s->hidden, EPILOGUE_ADD, s),
        .gate_up = part_of(&l->gate_up, s->x, l->attended_norm, s->gated, l->gate_up.columns / 2, EPILOGUE_SWIGLU, s),
        .down = part_of(&l->down, s->gated, NULL, s->x, s->hidden, EPILOGUE_ADD, s),
        .store = {.qkv = s->qkv, .q_norm = l->q_norm, .k_norm = l->k_norm, .cosines = s->cosines, .sines = s->sines,
                  .layer = region, .blocks = s->blocks, .slots = s->slots, .t = s->rows, .heads = s->heads,
                  .kv_heads = s->kv_heads, .block_size = s->block_size, .d = s->d, .eps = (float)s->eps,
                  .opening = WHOLE},
        .attention = {.q = s->qkv, .q_stride = l->qkv.columns, .out = s->attended, .layer = region,
                      .tables = s->tables, .table_at = s->table_at, .rows_at = s->rows_at, .contexts = s->contexts,
                      .tasks = s->tasks, .num_tasks = s->num_tasks, .heads = s->heads, .kv_heads = s->kv_heads,
                      .block_size = s->block_size, .d = s->d, .scale = (float)s->scale,
                      .scratch = s->attention_scratch, .scratch_bytes = s->attention_scratch_bytes}};
}

/* Layers in one region, or a half of one. */
typedef struct {
    Team team;
    Parts *parts;
    int64_t count;
} Run;

static void open_tasks(void *arg) {
    Run *run = arg;
    multiply(&run->team, &run->parts->qkv);
    meet(&run->team, &(Soon){NULL, NULL});
    store_tasks(&run->parts->store);
}

static void close_tasks(void *arg) {
    Run *run = arg;
    attention_tasks(&run->parts->attention);
    multiply(&run->team, &run->parts->o);
    multiply(&run->team, &run->parts->gate_up);
    multiply(&run->team, &run->parts->down);
}

static void layers_tasks(void *arg) {
    Run *run = arg;
    for (Parts *p = run->parts; p < run->parts + run->count; p++) {
        multiply(&run->team, &p->qkv);
        meet(&run->team, &(Soon){NULL, NULL});
        store_tasks(&p->store);
        meet(&run->team, &(Soon){NULL, NULL});
        attention_tasks(&p->attention);
        multiply(&run->team, &p->o);
        multiply(&run->team, &p->gate_up);
        multiply(&run->team, &p->down);
    }
}

/* Some columns of o: those from a panel's first one on. */
static Operand columns_of(const Operand *o, int64_t first, int64_t end) {
    int64_t panel = first / PANEL, pairs = pairs_of(o->inputs, (int)o->bits);
    return (Operand){.panels = o->panels + panel * pairs * PANEL * o->bits / 4,
                     .scales = o->scales ? o->scales + panel * (pairs / SCALED_PAIRS) * PANEL : NULL,
                     .bias = o->bias ? o->bias + first : NULL,
                     .bits = o->bits,
                     .columns = end - first,
                     .inputs = o->inputs};
}

/* Up to the new keys and values in their slots of `region`, the layer's, and the queries; or one of the two. */
API void baton_layer_open(int opening, const Layer *l, const Step *s, bf16 *region) {
    Parts parts = parts_of(l, s, region);
    int64_t queries = s->heads * s->d, first = opening & QUERIES ? 0 : queries / PANEL * PANEL;
    Operand wanted = columns_of(&l->qkv, first, opening & RECORDS ? l->qkv.columns : queries);
    parts.qkv = part_of(&wanted, s->x, l->input_norm, s->qkv + first, l->qkv.columns, EPILOGUE_STORE, s);
    parts.store.opening = opening;
    Run run = {.parts = &parts, .count = 1};
    parallel(open_tasks, &run, (int)s->threads);
}

/* The rest: `x` becomes the layer's output. */
API void baton_layer_close(const Layer *l, const Step *s, bf16 *region) {
    Parts parts = parts_of(l, s, region);
    Run run = {.parts = &parts, .count = 1};
    parallel(close_tasks, &run, (int)s->threads);
}

#define LAYERS_AT_ONCE 32

/* All layers: `x` becomes the last one's output. `region` is the first one's, the next lies `stride` elements on. */
API void baton_layers(const Layer *layers, int64_t count, const Step *s, bf16 *region, int64_t stride) {
    Parts parts[LAYERS_AT_ONCE];
    for (int64_t first = 0; first < count; first += LAYERS_AT_ONCE) {
        Run run = {.parts = parts, .count = count - first < LAYERS_AT_ONCE ? count - first : LAYERS_AT_ONCE};
        for (int64_t i = 0; i < run.count; i++)
            parts[i] = parts_of(layers + first + i, s, region + (first + i) * stride);
        parallel(layers_tasks, &run, (int)s->threads);
    }
}
