#include "ballast/model/architecture.h"

#include "src/model/spec/block_steps.h"
#include "src/model/spec/families/decoder.h"

namespace ballast::model {
namespace {

/// The gate of a shared expert: a map to one number, which like a router decides how much each
/// token uses the expert.
bool is_shared_gate(const BlockSpec& block, const TensorSpec& tensor) {
  return block.part == LayerPart::shared_expert && tensor.shape.front() == 1;
}

/// A linear map. Names of maps in stacks of experts do not end with ".weight". Transposed stacks,
/// those of gpt-oss, stay in the training type.
bool is_map(const BlockSpec& block, const TensorSpec& tensor) {
  if (is_layer_experts(tensor)) return true;
  const bool of_stack = block.part == LayerPart::expert && !tensor.stored.as_columns;
  return tensor.shape.size() == 2 && (of_stack || tensor.name.ends_with(".weight"));
}

/// A frozen linear map of a layer, except a router's.
bool can_be_quantized(const BlockSpec& block, const TensorSpec& tensor) {
  return tensor.frozen && block.kind == BlockKind::layer && is_map(block, tensor) &&
         block.part != LayerPart::router && !is_layer_router(tensor) && !tensor.table &&
         !is_shared_gate(block, tensor);
}

}  // namespace

void quantize(Architecture& model, const Quantization& how,
              const std::function<void(const std::string& rule)>& refuse) {
  if (model.config.layer_tiles > 1) {
    refuse("quantised layers cannot be cut into tiles; set model.layer_tiles to 1");
  }
  bool found = false;
  for (BlockSpec& block : model.blocks) {
    bool any = false;
    for (TensorSpec& tensor : block.tensors) {
      tensor.quantized = can_be_quantized(block, tensor);
      any = any || tensor.quantized;
    }
    if (any && block.pieces > 1) {
      refuse(
          "expert parallelism does not support quantised experts; set ballast.expert_parallel to "
          "1");
    }
    if (any) arrange(block);
    found = found || any;
  }
  if (!found) {
    refuse(
        "there are no frozen matrices to quantise; set ballast.train to \"adapters\" or to "
        "patterns of trained tensors");
  }
  model.quantization = how;
}

BlockCodes::BlockCodes(const Architecture& model, const BlockSpec& block) {
  if (block.quantized_elements == 0) return;
  for (const TensorSpec& tensor : block.tensors) {
    if (!tensor.quantized) continue;
    matrices.push_back({&tensor, bytes, QuantizedArrays(*model.quantization, tensor.size)});
    bytes += matrices.back().arrays.bytes;
  }
  bytes = round_up(bytes, kPage);
}

}  // namespace ballast::model
