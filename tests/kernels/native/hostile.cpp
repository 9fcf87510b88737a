#include "hostile.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "jobs.h"

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

bool is_decoder(Operation operation) { return uint32_t(operation) % 2 == 1; }

uint64_t most_bits(Operation operation) {
  if (is_rotated(operation)) return 4;
  if (operation == Operation::encode_mask || operation == Operation::decode_mask) return 1;
  return operation >= Operation::encode_integers ? 64 : 8;
}

size_t elements_size(const Case& given) {
  const Parameters& chosen = given.parameters;
  const bool integers = given.operation() >= Operation::encode_integers;
  return chosen.count * (integers ? chosen.item_bytes : element_bytes(ElementType(chosen.type)));
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
  chosen.rounds = uint32_t(1 + below(2));
  chosen.item_bytes = 1u << below(4);
  chosen.predicate = uint32_t(below(2));
  chosen.accumulate = has_headers(operation) && is_decoder(operation) && below(2);
  const Bytes bounds = bytes(8);
  std::memcpy(&chosen.low, bounds.data(), 4);
  std::memcpy(&chosen.high, bounds.data() + 4, 4);
  if (operation == Operation::decode_rotated) chosen.low = 0x1p-11f;  // from a table, as levels are
  chosen.key = random_();
  chosen.base = random_();
  chosen.channels = has_headers(operation) && below(3) == 0 ? 1 + below(600) : 0;
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
    result.content[table] = ascending((1 << bits) - 1, -1.0f);
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

}  // namespace daf::vectors
