#pragma once

#include <vector>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"
#include "ballast/model/architecture.h"
#include "ballast/model/compute.h"
#include "ballast/model/kernels.h"
#include "ballast/model/step_program.h"

namespace ballast::model {

/// Returns whether the block is a layer, or the first half of a layer with experts, in one piece.
inline bool is_layer_in_one_piece(const BlockSpec& block) {
  return block.kind == BlockKind::layer &&
         (block.content == BlockContent::whole || block.content == BlockContent::attention_half);
}

/// Checks that a model has a pass and that its arguments are large enough. The references must
/// outlive it.
class PassCheck {
 public:
  PassCheck(const Architecture& model, DType type, const MicroBatchShape& shape,
            const KernelSizes& sizes)
      : model_(model), type_(type), shape_(shape), sizes_(sizes) {}

  /// Throws Error(state) as described at Compute::run().
  void check(const Pass& pass, const PassArguments& arguments) const;

 private:
  [[nodiscard]] bool suits(const Pass& pass) const;
  /// Bytes that the kernel needs for an argument. `tile`: for Port::output_weights and
  /// output_gradient.
  [[nodiscard]] Bytes least(const Pass& pass, Port port, std::size_t tile,
                            std::uint32_t ranks) const;
  [[nodiscard]] Bytes min_loss_bytes(const Pass& pass) const;

  const Architecture& model_;
  DType type_;
  const MicroBatchShape& shape_;
  const KernelSizes& sizes_;
};

inline Elems elements_in(const std::vector<ElementRange>& ranges) {
  Elems sum = 0;
  for (const ElementRange& range : ranges) sum += range.count();
  return sum;
}

/// Returns whether one product of a backward pass overwrites the whole gradient of `tensor`.
inline bool is_overwritten(const Architecture& model, const BlockSpec& block,
                           const TensorSpec& tensor) {
  if (block.content == BlockContent::expert) return false;  // it may have no rows in a micro-batch
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
