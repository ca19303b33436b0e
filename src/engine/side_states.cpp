#include "ballast/engine/side_states.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "ballast/core/error.h"
#include "ballast/state/checksum.h"

namespace ballast::engine {

std::uint64_t hash_with(std::uint64_t states, const SideValues& side) {
  if (side.empty()) return states;
  state::RunningChecksum hash;
  hash.add(std::as_bytes(std::span(&states, 1)));
  for (const auto& [name, lists] : side) {
    for (const std::vector<float>& list : lists) hash.add(std::as_bytes(std::span(list)));
  }
  return hash.digest();
}

std::vector<std::size_t> SideStates::blocks_with(const SideStateKind& kind) const {
  std::vector<std::size_t> blocks;
  for (std::size_t b = 0; b < model_.blocks.size(); ++b) {
    if (kind.tensor(model_.blocks[b]) != nullptr) blocks.push_back(b);
  }
  return blocks;
}

void SideStates::set(SideValues values) {
  for (const SideStateKind& kind : kSideStates) {
    const auto given = values.find(kind.name);
    if (given == values.end()) continue;
    const std::vector<std::size_t> blocks = blocks_with(kind);
    expects(given->second.size() == blocks.size(), "side states of another number of blocks");
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const model::TensorSpec& tensor = *kind.tensor(model_.blocks[blocks[i]]);
      expects(given->second[i].size() * model::kAddends == tensor.size,
              "side states of another number of values");
    }
  }
  values_ = std::move(values);
}

void SideStates::set_from(
    const SideStateKind& kind,
    const std::function<std::vector<float>(std::size_t block, const model::TensorSpec& tensor)>&
        read) {
  std::vector<std::vector<float>> lists;
  for (const std::size_t block : blocks_with(kind)) {
    const model::TensorSpec& tensor = *kind.tensor(model_.blocks[block]);
    lists.push_back(model::sum_of_addends(tensor, read(block, tensor)));
  }
  if (!lists.empty()) values_.insert_or_assign(std::string(kind.name), std::move(lists));
}

void SideStates::balance(const std::vector<std::vector<std::uint64_t>>& rows, double speed) {
  const auto biases = values_.find(kCorrectionBiases.name);
  if (biases == values_.end()) return;
  const std::vector<std::size_t> routers = blocks_with(kCorrectionBiases);
  for (std::size_t r = 0; r < routers.size(); ++r) {
    const std::vector<std::uint64_t>& loads = rows.at(model_.blocks[routers[r]].layer);
    const std::uint64_t all = std::accumulate(loads.begin(), loads.end(), std::uint64_t{0});
    std::vector<float>& own = biases->second[r];
    for (std::size_t e = 0; e < own.size(); ++e) {
      // Whole numbers: load < all / experts.
      const std::uint64_t scaled = loads.at(e) * loads.size();
      const int sign = static_cast<int>(scaled < all) - static_cast<int>(scaled > all);
      own[e] += static_cast<float>(sign) * static_cast<float>(speed);
    }
  }
}

std::span<const float> SideStates::of(const SideStateKind& kind, std::size_t block) const {
  const auto lists = values_.find(kind.name);
  if (lists == values_.end() || kind.tensor(model_.blocks[block]) == nullptr) return {};
  const auto begin = model_.blocks.begin();
  const auto index = std::count_if(
      begin, begin + static_cast<std::ptrdiff_t>(block),
      [&](const model::BlockSpec& earlier) { return kind.tensor(earlier) != nullptr; });
  return lists->second[static_cast<std::size_t>(index)];
}

void SideStates::replace_in(std::size_t block, Elems first, std::span<float> elements) const {
  for (const SideStateKind& kind : kSideStates) {
    const std::span<const float> values = of(kind, block);
    if (values.empty()) continue;
    const model::TensorSpec& tensor = *kind.tensor(model_.blocks[block]);
    const Elems begin = std::max(first, tensor.offset);
    const Elems end = std::min(first + elements.size(), tensor.offset + tensor.size);
    for (Elems at = begin; at < end; ++at) {
      const Elems element = at - tensor.offset;
      float& one = elements[at - first];
      one = values[element % values.size()];
      model::split_into_addends(tensor, element, {&one, 1});
    }
  }
}

}  // namespace ballast::engine
