#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "ballast/core/error.h"
#include "ballast/model/compute.h"
#include "ballast/model/slots.h"

#include "src/model/compute/embedding.h"

namespace ballast::model {

/// The tables in the blocks of the embedding, and their gradients in slots.
template <class Ops>
class EmbeddingTables {
 public:
  using T = typename Ops::Value;

  EmbeddingTables(const Architecture& model, Ops& ops) : model_(model), ops_(ops) {
    if (!model.outer.scales_tokens) return;
    expects(model.outer.positions.empty(), "an embedding with positions is not scaled");
    const double scale = std::sqrt(static_cast<double>(model.config.hidden_size));
    token_scale_ = static_cast<float>(to_float(from_float<T>(static_cast<float>(scale))));
  }

  static Ids ids_of(const BatchViews& batch) {
    return {batch.tokens.raw(), batch.positions.raw(), batch.slots.raw()};
  }

  /// Views of the tables in a block. Gradients of frozen tables are null.
  template <class U>
  [[nodiscard]] Embedding<U> views(std::size_t block, U* values) const {
    const BlockSpec& about = model_.blocks[block];
    const TensorSpec& tokens = about.tensor(model_.outer.tokens);
    const TensorSpec* const positions =
        model_.outer.positions.empty() ? nullptr : about.find(model_.outer.positions);
    const auto at = [values](const TensorSpec* tensor) {
      const bool wanted = tensor != nullptr && (std::is_const_v<U> || !tensor->frozen);
      return wanted ? values + tensor->offset : nullptr;
    };
    return {.tokens = at(&tokens),
            .positions = at(positions),
            .scale = token_scale_,
            .first = tokens.first_row,
            .size = tokens.shape.front(),
            .tile = model_.config.vocabulary_tiles > 1,
            .begins = model_.split.tensor > 1 && block == 0};
  }
  /// Views of the sums of a block's gradient.
  [[nodiscard]] Embedding<float> sums(std::size_t block, DeviceView<float> all) const {
    const SlotSums layout(model_, model_.blocks[block]);
    Embedding<float> gradients = views<float>(block, all.raw());
    if (layout.rest > 0) gradients.positions = all.raw() + all.size() - layout.rest;
    return gradients;
  }

  /// Returns whether the sums are those of `size` elements of any block.
  [[nodiscard]] bool suit(std::size_t block, const GradientSums& sums, std::size_t size) const {
    const SlotSums layout(model_, model_.blocks.at(block));
    if (layout.table == 0) return size == sums.own.size() && sums.tied.empty();
    return size == layout.table + layout.rest && sums.tied.size() <= layout.table;
  }
  /// Describes the gradient of any block, to pack it. Enqueues work that finds the slots of the
  /// rows of a table. `slot_of_row`: memory for most_rows().
  [[nodiscard]] UnpackedGradient find_slots(std::size_t block, const GradientSums& sums,
                                            std::uint32_t* slot_of_row) const {
    if (!has_slots(model_, model_.blocks[block])) return {.rest = sums.own.raw()};
    const SlotSums layout(model_, model_.blocks[block]);
    const TensorSpec& table = model_.blocks[block].tensor(model_.outer.tokens);
    ops_.forget_slots(slot_of_row, table.shape.front());
    for (const BatchViews& batch : sums.batches) {
      ops_.find_slots(ids_of(batch), table.first_row, table.shape.front(), slot_of_row);
    }
    return {.slots = sums.own.raw(),
            .slot_of_row = slot_of_row,
            .rows = table.shape.front(),
            .width = model_.config.hidden_size,
            .table = layout.table,
            .rest = sums.own.raw() + sums.own.size() - layout.rest,
            .tied = sums.tied.raw(),
            .tied_size = sums.tied.size()};
  }
  /// Returns the rows of the largest table with slots.
  [[nodiscard]] std::size_t most_rows() const {
    std::size_t most = 0;
    for (const BlockSpec& block : model_.blocks) {
      if (!has_slots(model_, block)) continue;
      most = std::max<std::size_t>(most, block.tensor(model_.outer.tokens).shape.front());
    }
    return most;
  }

 private:
  const Architecture& model_;
  Ops& ops_;
  float token_scale_ = 1.0F;  ///< a value of the training type
};

}  // namespace ballast::model
