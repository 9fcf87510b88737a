// This thread's rounding and denormal modes.
#pragma once

#include <cstdint>

#if defined(__x86_64__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

namespace daf {

#if defined(__x86_64__) || defined(_M_X64)
// MXCSR. The default masks every exception; nothing is flushed, ties go to even.
constexpr uint64_t default_float_mode = 0x1F80;
inline uint64_t float_mode() { return _mm_getcsr(); }
inline void set_float_mode(uint64_t mode) { _mm_setcsr(unsigned(mode)); }
#elif defined(__aarch64__)
// FPCR, which also decides what a NaN becomes and which fp16 conversions write.
constexpr uint64_t default_float_mode = 0;
inline uint64_t float_mode() {
  uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
inline void set_float_mode(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
#else
constexpr uint64_t default_float_mode = 0;
inline uint64_t float_mode() { return default_float_mode; }
inline void set_float_mode(uint64_t) {}
#endif

// Sets the mode that the format requires, and restores the caller's at its end.
class DefaultFloatMode {
 public:
  DefaultFloatMode() : before_(float_mode()) { set_float_mode(default_float_mode); }
  ~DefaultFloatMode() { set_float_mode(before_); }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
  uint64_t before_;
};

}  // namespace daf
