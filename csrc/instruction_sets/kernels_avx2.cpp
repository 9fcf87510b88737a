#include "simd/vector_avx2.h"

#include "instruction_sets/kernel_table.h"

namespace daf {
extern const KernelTable avx2_kernels;
const KernelTable avx2_kernels = make_table("avx2");
}  // namespace daf
