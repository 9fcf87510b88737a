// Compile-time constants of the `rotated` codec; a test compares them with tables.py.
#pragma once

#include <cstdint>

namespace daf {

// A block's length after rounding to integers; 16 of it, plus rounding errors, fit 16 bits.
constexpr float integer_length = 2000.0f;
// The header's scale is in units of about the block's spread, not of one integer level.
constexpr float scale_unit = 2048.0f;
// Blocks whose sum of squares lies between these need no prescaling.
constexpr float least_ordinary_energy = 0x1p-60f, greatest_ordinary_energy = 0x1p60f;
// Coefficients are compared with thresholds after multiplication by this and a shift of 16 bits.
constexpr int16_t coefficient_multiplier = 1704;
constexpr int between_rounds_shift = 4;
// A block has two rounds where this times its fourth powers' sum passes its energy's square.
constexpr float peaked_factor = 16.0f;
constexpr uint16_t bfloat16_sign = 0x8000;

}  // namespace daf
