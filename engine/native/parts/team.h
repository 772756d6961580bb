/* The threads of one parallel region: how they are called together, how they take work, and how they meet.
 *
 * They are those of the OpenMP library that PyTorch has loaded: a second pool beside it would spin against the first.
 * Without that library, or with one thread, the caller does all the work. Work is cut into tasks that threads take from
 * a counter; what one of them has written before `meet`, all of them may read after it.
 */
#pragma once
#include <sched.h>

#include "base.h"

extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));
extern int omp_get_num_threads(void) __attribute__((weak));

#define SPINS_MAX 4096
#define SOON_BYTES_MAX (256 << 10) /* of a second cache of at least 512 KiB */

/* The threads of one parallel region, which meet between its parts: to begin a region costs several such meetings. All
 * zeros when the region begins. */
typedef struct {
    int64_t arrived __attribute__((aligned(64))), round __attribute__((aligned(64)));
} Team;

/* Memory that a thread is about to read. */
typedef struct {
    const char *at, *end;
} Soon;

/* Runs `fn(arg)` on so many threads, the caller among them, and returns when all have. */
static void parallel(void (*fn)(void *), void *arg, int threads) {
    if (threads > 1 && GOMP_parallel && omp_get_num_threads) GOMP_parallel(fn, arg, (unsigned)threads, 0);
    else fn(arg);
}

INLINE int64_t take(int64_t *counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

static int cores_usable;

/* How many cores this process may use: nobody spins before this was called. Any thread may call it. */
API void baton_kernels_cores(int cores) { __atomic_store_n(&cores_usable, cores, __ATOMIC_RELAXED); }

/* Looks that a thread takes before it gives its core away: none where there are more threads than cores, since whom it
 * waits for may be waiting for the core. */
static int spins_of(int threads) { return threads > __atomic_load_n(&cores_usable, __ATOMIC_RELAXED) ? 0 : SPINS_MAX; }

/* Returns when all threads of the region have come. Who waits for the others asks for what it reads next. */
static void meet(Team *team, Soon *soon) {
    int threads = omp_get_num_threads ? omp_get_num_threads() : 1;
    if (threads == 1) return;
    int64_t round = __atomic_load_n(&team->round, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_ACQ_REL) == threads) {
        __atomic_store_n(&team->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&team->round, round + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int spins = spins_of(threads); __atomic_load_n(&team->round, __ATOMIC_ACQUIRE) == round;) {
        if (soon->at < soon->end) {
            for (int i = 0; i < 256; i += 64) __builtin_prefetch(soon->at + i, 0, 2);
            soon->at += 256;
        } else if (spins > 0) {
            spins--;
            pause_core();
        } else {
            sched_yield();
        }
    }
}
