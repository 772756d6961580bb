/* The compute kernels for aarch64 with BF16 (BFDOT: pairs of products, sums in float32). */
#if defined(__aarch64__) && defined(__GNUC__)
#define PAIRS
#include "sets/neon.h"

#include "parts/all.h"
#endif
