/* The compute kernels for AVX-512 with BF16 (VDPBF16PS: pairs of products, sums in float32). */
#if defined(__x86_64__) && defined(__GNUC__)
#define PAIRS
#include "sets/avx512.h"

#include "parts/all.h"
#endif
