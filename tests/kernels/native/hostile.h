// Random calls over random bytes: planes, headers, masks and elements that no encoder ever wrote.
#pragma once

#include <random>

#include "cases.h"

namespace daf::vectors {

class HostileCases {
 public:
  explicit HostileCases(uint64_t seed) : random_(seed) {}

  // Outputs have their sizes, but no expected content yet.
  Case any();
  // Piece `piece` of `sweep_pieces`: together they give both header numbers every bit pattern.
  Case sweep(Operation operation, int piece);

 private:
  Case make(Operation operation, uint64_t count);
  void choose_parameters(Parameters& chosen);
  void fill_encoder(Case& result);
  void fill_decoder(Case& result);
  void fill_norm(Case& given);
  void fill_norm_forward(Case& given);
  void fill_norm_backward(Case& given);
  uint64_t below(uint64_t limit) { return random_() % limit; }
  Bytes bytes(size_t size);
  Bytes tame_or_wild(size_t size);
  Bytes levels();

  std::mt19937_64 random_;
};

constexpr int sweep_pieces = 64;

}  // namespace daf::vectors
