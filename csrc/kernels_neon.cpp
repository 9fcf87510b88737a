// The vectors come first: everything in table.h is written in them.
#include "vector_neon.h"

#include "table.h"

namespace daf {
extern const KernelTable neon_kernels;
const KernelTable neon_kernels = make_table("neon");
}  // namespace daf
