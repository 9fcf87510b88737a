// Numbers of the `rotated` codec that kernels are compiled with; tables.py has them too, and a test
// compares the two.
#pragma once

#include <cstdint>

namespace daf {

// A block's length after rounding to integers; 16 of it, and the errors of rounding, fit 16 bits.
constexpr float integer_length = 2000.0f;
// The header's scale is in units of about the block's own spread, not of one integer level.
constexpr float scale_unit = 2048.0f;
// Blocks whose sum of squares lies between these need no prescaling.
constexpr float least_ordinary_energy = 0x1p-60f, greatest_ordinary_energy = 0x1p60f;
// Coefficients are compared with thresholds after multiplication by this and loss of 16 bits.
constexpr int16_t coefficient_multiplier = 1704;
constexpr int between_rounds_shift = 4;

}  // namespace daf
