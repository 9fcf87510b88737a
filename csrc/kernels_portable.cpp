// The vectors come first: everything in table.h is written in them.
#include "vector_portable.h"

#include "table.h"

namespace daf {
extern const KernelTable portable_kernels;
const KernelTable portable_kernels = make_table("portable");
}  // namespace daf
