#include "simd/vector_neon.h"

#include "instruction_sets/kernel_table.h"

namespace daf {
extern const KernelTable neon_kernels;
const KernelTable neon_kernels = make_table("neon");
}  // namespace daf
