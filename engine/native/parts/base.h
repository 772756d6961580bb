/* A few words, for every part. The set's header comes first: it names the instructions that all of it is compiled for. */
#pragma once

typedef uint16_t bf16;
#define API __attribute__((visibility("default"))) /* what kernels.py and engine/models/native_decoder.py call */
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
