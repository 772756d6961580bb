/* The compute kernels for AVX-512 without BF16: weights are widened to float32. */
#if defined(__x86_64__) && defined(__GNUC__)
#include "sets/avx512.h"

#include "parts/all.h"
#endif
