#include "simd/vector_portable.h"

#include "instruction_sets/kernel_table.h"

namespace daf {
extern const KernelTable portable_kernels;
const KernelTable portable_kernels = make_table("portable");
}  // namespace daf
