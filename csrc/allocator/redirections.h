// Which calls of which libraries are redirected, and where to.
#pragma once

#include <cstdint>
#include <vector>

#include "allocator/relocations.h"

namespace daf::allocator {

// Bits of `redirections`: calls that hand out our blocks; that may receive them; PyTorch's own.
constexpr uint32_t births = 0b11111000111, deaths = 0b111000, tensors = 0b1;

std::vector<Redirection> redirections();
Library library_of(const char* path);

}  // namespace daf::allocator
