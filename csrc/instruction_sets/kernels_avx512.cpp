#include "simd/vector_avx512.h"

#include "instruction_sets/kernel_table.h"

namespace daf {
extern const KernelTable avx512_kernels;
const KernelTable avx512_kernels = make_table("avx512");
}  // namespace daf
