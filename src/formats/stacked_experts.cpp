#include "src/formats/stacked_experts.h"

#include <array>
#include <cstdint>
#include <string_view>

#include <fmt/format.h>

namespace ballast::formats {
namespace {

constexpr std::string_view kExperts = ".experts.";

/// A stacked tensor and the matrices of one expert in it, in their order.
struct Stack {
  std::string_view name;
  std::array<std::string_view, 2> matrices;  ///< the second one may be ""
};
constexpr std::array<Stack, 2> kStacks = {
    {{"gate_up_proj", {"gate_proj", "up_proj"}}, {"down_proj", {"down_proj", ""}}}};

}  // namespace

std::vector<StoredTensor> matrices_of_experts(const StoredTensor& tensor) {
  std::vector<StoredTensor> matrices;
  const bool separable = tensor.elements > 0 && tensor.bytes % tensor.elements == 0;
  if (tensor.shape.size() != 3 || !separable) return matrices;
  for (const Stack& stack : kStacks) {
    const std::string_view name = tensor.name;
    if (!name.ends_with(stack.name)) continue;
    const std::string_view before = name.substr(0, name.size() - stack.name.size());
    const std::uint64_t parts = stack.matrices.back().empty() ? 1 : 2;
    if (!before.ends_with(kExperts) || tensor.shape[1] % parts != 0) continue;
    const std::uint64_t rows = tensor.shape[1] / parts;
    const std::uint64_t count = tensor.shape[0] * parts;
    const Bytes bytes = tensor.bytes / count;
    matrices.reserve(count);
    for (std::uint64_t i = 0; i < count; ++i) {
      matrices.push_back(
          {.name = fmt::format("{}{}.{}.weight", before, i / parts, stack.matrices.at(i % parts)),
           .dtype = tensor.dtype,
           .shape = {rows, tensor.shape[2]},
           .elements = tensor.elements / count,
           .offset = tensor.offset + i * bytes,
           .bytes = bytes});
    }
  }
  return matrices;
}

}  // namespace ballast::formats
