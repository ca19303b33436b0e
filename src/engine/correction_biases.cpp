#include <algorithm>
#include <numeric>

#include "ballast/core/error.h"
#include "ballast/engine/run_states.h"
#include "ballast/model/architecture.h"

namespace ballast::engine {

CorrectionBiases::CorrectionBiases(const model::Architecture& model) : model_(model) {
  for (std::size_t b = 0; b < model.blocks.size(); ++b) {
    if (model::correction_biases(model.blocks[b]) != nullptr) blocks_.push_back(b);
  }
}

void CorrectionBiases::set(const std::vector<std::vector<float>>& values) {
  expects(values.empty() || values.size() == blocks_.size(),
          "correction biases of another number of routers");
  for (std::size_t r = 0; r < values.size(); ++r) {
    const model::TensorSpec& tensor = *model::correction_biases(model_.blocks[blocks_[r]]);
    expects(values[r].size() * model::kAddends == tensor.size,
            "correction biases of another number of experts");
  }
  values_ = values;
}

void CorrectionBiases::set_from(
    const std::function<std::vector<float>(std::size_t block, const model::TensorSpec& tensor)>&
        read) {
  values_.clear();
  for (const std::size_t block : blocks_) {
    const model::TensorSpec& tensor = *model::correction_biases(model_.blocks[block]);
    values_.push_back(model::sum_of_addends(tensor, read(block, tensor)));
  }
}

void CorrectionBiases::move(const std::vector<std::vector<std::uint64_t>>& rows, double speed) {
  for (std::size_t r = 0; r < values_.size(); ++r) {
    const std::vector<std::uint64_t>& loads = rows.at(model_.blocks[blocks_[r]].layer);
    const std::uint64_t all = std::accumulate(loads.begin(), loads.end(), std::uint64_t{0});
    for (std::size_t e = 0; e < values_[r].size(); ++e) {
      // Whole numbers: load < all / experts.
      const std::uint64_t scaled = loads.at(e) * loads.size();
      const int sign = static_cast<int>(scaled < all) - static_cast<int>(scaled > all);
      values_[r][e] += static_cast<float>(sign) * static_cast<float>(speed);
    }
  }
}

std::span<const float> CorrectionBiases::of(std::size_t block) const {
  const auto found = std::ranges::find(blocks_, block);
  if (values_.empty() || found == blocks_.end()) return {};
  return values_[static_cast<std::size_t>(found - blocks_.begin())];
}

void CorrectionBiases::replace_in(std::size_t block, Elems first, std::span<float> elements) const {
  const std::span<const float> values = of(block);
  if (values.empty()) return;
  const model::TensorSpec& tensor = *model::correction_biases(model_.blocks[block]);
  const Elems begin = std::max(first, tensor.offset);
  const Elems end = std::min(first + elements.size(), tensor.offset + tensor.size);
  for (Elems at = begin; at < end; ++at) {
    const Elems element = at - tensor.offset;
    float& one = elements[at - first];
    one = values[element % values.size()];
    model::split_into_addends(tensor, element, {&one, 1});
  }
}

}  // namespace ballast::engine
