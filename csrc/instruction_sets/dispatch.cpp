#include "instruction_sets/dispatch.h"

namespace daf {

extern const KernelTable portable_kernels;
#if defined(DAF_X86_KERNELS)
extern const KernelTable avx2_kernels;
extern const KernelTable avx512_kernels;

namespace {

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

}  // namespace
#elif defined(DAF_NEON_KERNELS)
extern const KernelTable neon_kernels;
#endif

const std::vector<const KernelTable*>& available_tables() {
  static const std::vector<const KernelTable*> tables = [] {
    std::vector<const KernelTable*> found;
#if defined(DAF_X86_KERNELS)
    __builtin_cpu_init();
    if (has_avx512()) found.push_back(&avx512_kernels);
    if (has_avx2()) found.push_back(&avx2_kernels);
#elif defined(DAF_NEON_KERNELS)
    found.push_back(&neon_kernels);  // every 64-bit Arm processor has NEON
#endif
    found.push_back(&portable_kernels);
    return found;
  }();
  return tables;
}

const KernelTable* find_table(const std::string& name) {
  for (const KernelTable* table : available_tables())
    if (name == table->name) return table;
  return nullptr;
}

}  // namespace daf
