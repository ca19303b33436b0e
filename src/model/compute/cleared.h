#pragma once

#include <vector>

#include "ballast/core/element_range.h"
#include "ballast/model/architecture.h"

namespace ballast::model {

inline Elems elements_in(const std::vector<ElementRange>& ranges) {
  Elems sum = 0;
  for (const ElementRange& range : ranges) sum += range.count();
  return sum;
}

/// Returns whether one product of a backward pass overwrites the whole gradient of `tensor`.
inline bool is_overwritten(const Architecture& model, const BlockSpec& block,
                           const TensorSpec& tensor) {
  if (block.part == LayerPart::expert) return false;  // it may have no rows in a micro-batch
  if (block.kind == BlockKind::layer) return tensor.shape.size() == 2;
  return block.kind == BlockKind::head && tensor.name == model.outer.output;
}

/// Returns the ranges of trained elements that no product overwrites, padding included, ascending.
inline std::vector<ElementRange> cleared_ranges(const Architecture& model, const BlockSpec& block) {
  std::vector<ElementRange> ranges;
  Elems done = 0;
  const auto clear_until = [&](Elems end) {
    if (end > done) ranges.push_back({done, end});
  };
  for (const TensorSpec& tensor : block.tensors) {
    if (tensor.frozen || !is_overwritten(model, block, tensor)) continue;
    clear_until(tensor.offset);
    done = tensor.offset + tensor.size;
  }
  clear_until(block.own_trained_elements());
  return ranges;
}

}  // namespace ballast::model
