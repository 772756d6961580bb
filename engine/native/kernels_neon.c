/* The compute kernels for aarch64: weights are widened to float32. */
#if defined(__aarch64__) && defined(__GNUC__)
#include "sets/neon.h"

#include "parts/all.h"
#endif
