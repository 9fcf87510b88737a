// What both x86 headers begin with.
#pragma once

#include <immintrin.h>
#include <cstdint>
#include <utility>

#define DAF_INLINE static inline __attribute__((always_inline))
#define DAF_MEMBER_INLINE inline __attribute__((always_inline))
#define DAF_NEVER_INLINE __attribute__((noinline))
#define DAF_UNROLLED _Pragma("GCC unroll 16")
