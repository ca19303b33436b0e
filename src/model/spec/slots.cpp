#include "ballast/model/slots.h"

#include <algorithm>
#include <cstddef>

namespace ballast::model {
namespace {

/// Sums of positions begin on a cache line.
constexpr Elems kAlignment = kCacheLine / sizeof(float);

const TensorSpec* trained_tensor(const BlockSpec& block, const std::string& name) {
  const TensorSpec* const tensor = name.empty() ? nullptr : block.find(name);
  return tensor == nullptr || tensor->frozen ? nullptr : tensor;
}

/// Returns the trained table of an embedding block, or nullptr.
const TensorSpec* trained_table(const Architecture& model, const BlockSpec& block) {
  return block.kind == BlockKind::embedding ? trained_tensor(block, model.outer.tokens) : nullptr;
}

}  // namespace

bool has_slots(const Architecture& model, const BlockSpec& block) {
  return trained_table(model, block) != nullptr;
}

SlotSums::SlotSums(const Architecture& model, const BlockSpec& block) {
  if (!has_slots(model, block)) return;
  const TensorSpec* const positions = trained_tensor(block, model.outer.positions);
  const Elems all = block.own_trained_elements();
  table = positions == nullptr ? all : positions->offset;
  rest = all - table;
}

Elems elements_of_sum(const Architecture& model, const BlockSpec& block, std::uint64_t tokens) {
  if (block.kind != BlockKind::embedding) return block.own_trained_elements();
  Elems largest = 0;
  for (std::uint64_t p = 0; p < block.pieces; ++p) {
    const BlockSpec own = piece_of(block, p);
    const TensorSpec* const table = trained_table(model, own);
    if (table == nullptr) return own.trained_elements();
    const Elems slots = std::min(table->shape.front(), tokens) * table->shape.back();
    largest = std::max(largest, round_up(slots, kAlignment) + SlotSums(model, own).rest);
  }
  return largest;
}

std::optional<std::int32_t> pad_token(const ModelConfig& config) {
  const auto found = config.details.find(kPadToken);
  if (found == config.details.end()) return {};
  const auto token = found->second.whole();
  return token ? std::optional(static_cast<std::int32_t>(*token)) : std::nullopt;
}

std::vector<std::int32_t> number_slots(const Architecture& own,
                                       std::span<const std::int32_t> tokens) {
  struct Tile {
    std::uint64_t end = 0;
    std::int32_t slots = 0;
  };
  std::vector<Tile> tiles;
  for (std::size_t t = 0; t < own.own_vocabulary_tiles(); ++t) {
    const VocabularyTile tile = own.tile(t);
    tiles.push_back({tile.first + tile.rows});
  }
  const std::uint64_t first = own.tile(0).first;
  std::vector<std::int32_t> slot_of_row(tiles.back().end - first, -1);
  const std::optional<std::int32_t> pad = pad_token(own.config);
  std::vector<std::int32_t> slots;
  slots.reserve(tokens.size());
  for (const std::int32_t token : tokens) {
    const std::uint64_t row = static_cast<std::uint64_t>(token) - first;
    if (token == pad) {
      slots.push_back(kPadSlot);
      continue;
    }
    if (row >= slot_of_row.size()) {
      slots.push_back(0);
      continue;
    }
    std::int32_t& slot = slot_of_row[row];
    if (slot < 0) slot = std::ranges::upper_bound(tiles, first + row, {}, &Tile::end)->slots++;
    slots.push_back(slot);
  }
  return slots;
}

}  // namespace ballast::model
