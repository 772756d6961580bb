/* The compute kernels for AVX2 with FMA: weights are widened to float32. */
#if defined(__x86_64__) && defined(__GNUC__)
#include "sets/avx2.h"

#include "parts/all.h"
#endif
