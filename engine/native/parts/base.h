/* What every part of kernels.c begins with: the instructions that all of it is compiled for, and a few words. */
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,bmi2,prfchw")

typedef uint16_t bf16;
#define API __attribute__((visibility("default"))) /* what kernels.py and engine/models/native_decoder.py call */
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
