#include "cases.h"

#include <stdexcept>

namespace daf::vectors {
namespace {

void read(std::istream& file, void* to, size_t size) {
  if (!file.read(static_cast<char*>(to), std::streamsize(size)))
    throw std::runtime_error("the file of cases is cut off");
}

template <class Container> void read_all(std::istream& file, Container& result) {
  uint64_t size;
  read(file, &size, sizeof size);
  result.resize(size);
  read(file, result.data(), size);
}

}  // namespace

bool read_case(std::istream& file, Case& result) {
  if (file.peek() == std::istream::traits_type::eof()) return false;
  read_all(file, result.name);
  read(file, &result.parameters, sizeof result.parameters);
  if (result.parameters.operation >= operation_count)
    throw std::runtime_error("the file of cases names an operation that does not exist");
  for (Bytes& content : result.content) read_all(file, content);
  read_all(file, result.before);
  return true;
}

}  // namespace daf::vectors
