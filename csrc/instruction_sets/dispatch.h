// The instruction sets that this build has and this processor can run.
#pragma once

#include <string>
#include <vector>

#include "arguments/job.h"

namespace daf {

// Widest first; "portable" is always the last.
const std::vector<const KernelTable*>& available_tables();

// The table of that name, or nullptr.
const KernelTable* find_table(const std::string& name);

}  // namespace daf
