/* The compute kernels for AMX: products by tiles of bfloat16. Attention is that of AVX-512, in float32: CPUs that have
 * tiles multiply pairs in vectors more slowly than that. */
#if defined(__x86_64__) && defined(__GNUC__)
#define TILES
#include "sets/avx512.h"

#include "parts/all.h"
#endif
