#include "hostile.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "arguments/job.h"

namespace daf::vectors {
namespace {

constexpr size_t header_patterns = 1 << 16;
constexpr size_t table_cells = 16;

bool is_rotated(Operation operation) {
  return operation == Operation::encode_rotated || operation == Operation::decode_rotated;
}

bool has_headers(Operation operation) {
  return is_rotated(operation) || operation == Operation::encode_minmax ||
         operation == Operation::decode_minmax;
}

// With an affine of any channels, perhaps.
bool has_affine(Operation operation) {
  return has_headers(operation) || operation == Operation::encode_steps ||
         operation == Operation::decode_steps;
}

bool is_integers(Operation operation) {
  return operation == Operation::encode_integers || operation == Operation::decode_integers;
}

bool is_norm(Operation operation) { return operation >= Operation::emit; }

bool is_forward(Operation operation) {
  return operation == Operation::emit || operation == Operation::emit_rows;
}

bool is_of_rows(Operation operation) {
  return operation == Operation::emit_rows || operation == Operation::row_gradient;
}

bool is_decoder(Operation operation) { return uint32_t(operation) % 2 == 1; }

uint64_t most_bits(Operation operation) {
  if (is_rotated(operation)) return 4;
  if (operation == Operation::encode_mask || operation == Operation::decode_mask) return 1;
  return is_integers(operation) ? 64 : 8;
}

size_t elements_size(const Case& given) {
  const Parameters& chosen = given.parameters;
  return chosen.count * (is_integers(given.operation()) ? chosen.item_bytes
                                                        : element_bytes(ElementType(chosen.type)));
}

size_t planes_size(const Case& given) {
  return 4 * words_per_block * block_count(given.parameters.count) * given.parameters.bits;
}

// Numbers in ascending order.
Bytes ascending(size_t count, float first) {
  Bytes result(4 * count);
  for (size_t i = 0; i < count; ++i) {
    const float value = first + 0.25f * float(i);
    std::memcpy(result.data() + 4 * i, &value, 4);
  }
  return result;
}

}  // namespace

Bytes HostileCases::bytes(size_t size) {
  Bytes result(size);
  for (size_t i = 0; i < size; i += sizeof(uint64_t)) {
    const uint64_t word = random_();
    std::memcpy(result.data() + i, &word, std::min(sizeof word, size - i));
  }
  return result;
}

// Any but -128: no table has it, and sums of it would not fit.
Bytes HostileCases::levels() {
  Bytes result = bytes(table_cells);
  for (uint8_t& level : result) level = level == 0x80 ? 0x7F : level;
  return result;
}

// Half of them without the highest bit of the exponent: numbers below 2, of whatever type.
Bytes HostileCases::tame_or_wild(size_t size) {
  Bytes result = bytes(size);
  if (below(2))
    for (size_t i = 1; i < size; i += 2) result[i] &= 0xBF;
  return result;
}

Case HostileCases::any() {
  const auto operation = Operation(below(operation_count));
  return make(operation, 1 + below(below(4) ? 3000 : 70));
}

Case HostileCases::sweep(Operation operation, int piece) {
  constexpr size_t blocks = header_patterns / sweep_pieces;
  Case result = make(operation, blocks * block_elements);
  for (size_t i = 0; i < blocks; ++i) {
    const size_t pattern = size_t(piece) * blocks + i;
    const uint16_t pair[] = {uint16_t(pattern), uint16_t(pattern * 40503)};  // odd: all of them
    std::memcpy(result.content[headers].data() + sizeof pair * i, pair, sizeof pair);
  }
  return result;
}

Case HostileCases::make(Operation operation, uint64_t count) {
  Case result;
  Parameters& chosen = result.parameters;
  chosen.operation = uint32_t(operation);
  chosen.count = count;
  choose_parameters(chosen);
  if (is_norm(operation))
    fill_norm(result);
  else
    is_decoder(operation) ? fill_decoder(result) : fill_encoder(result);
  for (const int row : {scale, shift}) result.content[row] = tame_or_wild(4 * chosen.channels);
  result.name = "operation " + std::to_string(chosen.operation) + ", " +
                std::to_string(chosen.bits) + " bits, element type " + std::to_string(chosen.type) +
                ", " + std::to_string(count) + " elements";
  return result;
}

void HostileCases::choose_parameters(Parameters& chosen) {
  const auto operation = Operation(chosen.operation);
  chosen.type = uint32_t(below(3));
  chosen.bits = uint32_t(below(2) ? most_bits(operation) : 1 + below(most_bits(operation)));
  chosen.item_bytes = 1u << below(4);
  chosen.predicate = uint32_t(below(2));
  chosen.accumulate = has_headers(operation) && is_decoder(operation) && below(2);
  const Bytes bounds = bytes(8);
  std::memcpy(&chosen.low, bounds.data(), 4);
  std::memcpy(&chosen.high, bounds.data() + 4, 4);
  if (operation == Operation::decode_rotated) chosen.low = 0x1p-11f;  // from a table, as levels are
  chosen.key = random_();
  chosen.base = random_();
  chosen.channels = has_affine(operation) && below(3) == 0 ? 1 + below(600) : 0;
  chosen.inner = below(2) ? 1 : 1 + below(uint64_t{1} << below(64));
}

void HostileCases::fill_encoder(Case& result) {
  const uint32_t bits = result.parameters.bits;
  result.content[input] = tame_or_wild(elements_size(result));
  result.content[output].resize(planes_size(result));
  if (has_headers(result.operation()))
    result.content[output_headers].resize(4 * block_count(result.parameters.count));
  if (is_rotated(result.operation())) {
    result.content[thresholds] = bytes(table_cells * bits);
    result.content[table] = levels();
  } else if (result.operation() == Operation::encode_derivative) {
    result.content[table] = ascending(15, -1.0f);
    const Bytes lines = bytes(4 * 32);
    result.content[table].insert(result.content[table].end(), lines.begin(), lines.end());
  }
}

void HostileCases::fill_decoder(Case& result) {
  const Parameters& chosen = result.parameters;
  const size_t blocks = block_count(chosen.count);
  result.content[input] = bytes(planes_size(result));
  result.content[output].resize(elements_size(result));
  if (chosen.accumulate) result.before = tame_or_wild(elements_size(result));
  if (has_headers(result.operation())) {
    result.content[headers] = tame_or_wild(4 * blocks);
    if (below(2)) result.content[mask] = bytes(4 * words_per_block * blocks);
  }
  if (is_rotated(result.operation()))
    result.content[table] = levels();
  else if (result.operation() == Operation::decode_derivative)
    result.content[table] = tame_or_wild(size_t{4} << chosen.bits);
}

// One whose values come from any codec, with an addend or mask or without.
void HostileCases::fill_norm(Case& given) {
  Parameters& chosen = given.parameters;
  chosen.type = uint32_t(ElementType::float32);
  chosen.codec = uint32_t(below(3));
  chosen.bits = uint32_t(1 + below(Codec(chosen.codec) == Codec::rotated ? 4 : 8));
  chosen.low = 0x1p-11f;
  chosen.centred = uint32_t(below(2));
  chosen.epsilon = below(2) ? 1e-5 : 0.0;
  chosen.second_inner = below(2) ? 1 : 1 + below(300);
  chosen.second_channels = 1 + below(600);
  if (is_of_rows(given.operation())) {
    const uint64_t length = 1 + below(std::min<uint64_t>(chosen.count, 700));
    chosen.count -= chosen.count % length;
    chosen.inner = chosen.second_inner = length;
    chosen.second_channels = chosen.count / length;
  }
  chosen.channels = Codec(chosen.codec) == Codec::kept ? 1 + below(600) : 0;
  if (is_of_rows(given.operation()) && chosen.channels) chosen.channels = chosen.second_channels;
  is_forward(given.operation()) ? fill_norm_forward(given) : fill_norm_backward(given);
}

void HostileCases::fill_norm_forward(Case& given) {
  Parameters& chosen = given.parameters;
  const size_t floats = 4 * chosen.count, plane = 4 * words_per_block * block_count(chosen.count);
  given.content[input] = tame_or_wild(floats);
  if (Codec(chosen.codec) != Codec::kept) {
    given.content[output].resize(planes_size(given));
    given.content[output_headers].resize(4 * block_count(chosen.count));
    given.content[thresholds] = bytes(table_cells * chosen.bits);
    given.content[table] = levels();
  }
  given.content[result].resize(floats);
  if (below(2)) given.content[gradient] = tame_or_wild(floats);
  if (below(2)) given.content[result_mask].resize(plane);
  if (given.operation() == Operation::emit_rows) {
    for (const int row : {sums, products})
      given.content[row].resize(4 * (chosen.count / chosen.inner));
    chosen.second_inner = 1;  // gamma and beta: along the row
    chosen.second_channels = chosen.inner;
  }
  for (const int row : {second_scale, second_shift})
    given.content[row] = tame_or_wild(4 * chosen.second_channels);
}

void HostileCases::fill_norm_backward(Case& given) {
  const Parameters& chosen = given.parameters;
  const size_t floats = 4 * chosen.count, blocks = block_count(chosen.count);
  const bool kept = Codec(chosen.codec) == Codec::kept;
  given.content[input] = kept ? tame_or_wild(floats) : bytes(planes_size(given));
  if (!kept) given.content[headers] = tame_or_wild(4 * blocks);
  given.content[table] = levels();
  given.content[gradient] = tame_or_wild(floats);
  given.content[result].resize(floats);
  const bool of_rows = is_of_rows(given.operation());
  if (!of_rows && below(2)) given.content[mask] = bytes(4 * words_per_block * blocks);
  const uint64_t width = of_rows ? chosen.second_inner : chosen.second_channels;
  if (of_rows || given.operation() == Operation::sum_gradient)
    for (const int row : {sums, products}) given.content[row].resize(8 * width);
  if (!of_rows || below(2))
    for (const int row : {second_scale, second_shift}) given.content[row] = tame_or_wild(4 * width);
  for (const int row : {third_scale, third_shift})
    given.content[row] = tame_or_wild(4 * chosen.second_channels);
}

}  // namespace daf::vectors
