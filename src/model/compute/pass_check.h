#pragma once

#include "ballast/core/dtype.h"
#include "ballast/model/architecture.h"
#include "ballast/model/kernel_sizes.h"
#include "ballast/model/pass_arguments.h"
#include "ballast/model/step_program.h"

namespace ballast::model {

/// Returns whether the block is a layer, or the first half of a layer with experts, in one piece.
inline bool is_layer_in_one_piece(const BlockSpec& block) {
  return block.kind == BlockKind::layer &&
         (block.part == LayerPart::whole || block.part == LayerPart::attention_half);
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

}  // namespace ballast::model
