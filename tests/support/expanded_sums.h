#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ballast/model/block_layout.h"

namespace ballast::test {

/// Returns the gradient of all elements of an embedding block with sum rows, from its sums.
/// `sum_rows`: those of the step's tokens.
template <class Value>
std::vector<Value> expanded_sums(const model::Architecture& model, const model::BlockSpec& block,
                                 std::span<const std::int32_t> tokens,
                                 std::span<const std::int32_t> sum_rows,
                                 const std::vector<Value>& sums) {
  const model::TokenSums layout(model, block);
  const model::TensorSpec& table = block.tensor(model.outer.tokens);
  const auto width = static_cast<std::ptrdiff_t>(table.shape.back());
  std::vector<Value> all(layout.table);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const std::uint64_t row = static_cast<std::uint64_t>(tokens[i]) - table.first_row;
    if (row >= table.shape.front() || sum_rows[i] == model::kPadSumRow) continue;
    const auto from = sums.begin() + sum_rows[i] * width;
    std::copy(from, from + width, all.begin() + static_cast<std::ptrdiff_t>(row) * width);
  }
  all.insert(all.end(), sums.end() - static_cast<std::ptrdiff_t>(layout.rest), sums.end());
  return all;
}

}  // namespace ballast::test
