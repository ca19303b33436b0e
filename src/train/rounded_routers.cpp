#include "src/train/rounded_routers.h"

#include <algorithm>

#include <fmt/format.h>

namespace ballast::train {

RoundedRouters::RoundedRouters(const model::Architecture& model, DType type) : type_(type) {
  if (type == DType::f32) return;
  for (const model::BlockSpec& block : model.blocks) {
    if (block.part != model::LayerPart::router) continue;
    for (const model::TensorSpec& tensor : block.tensors) {
      if (tensor.shape.size() == 2) routers_.insert(tensor.name);
    }
  }
}

void RoundedRouters::add(const model::TensorSpec& tensor, std::span<const float> values) {
  if (!routers_.contains(tensor.name)) return;
  const bool rounded = with_training_type(type_, [&](auto type) {
    return std::ranges::any_of(
        values, [](float value) { return to_float(from_float<decltype(type)>(value)) != value; });
  });
  if (!rounded) return;
  const std::scoped_lock lock(mutex_);
  rounded_.insert(tensor.name);
}

std::string RoundedRouters::warning() const {
  const std::scoped_lock lock(mutex_);
  if (rounded_.empty()) return "";
  const bool bf16 = type_ == DType::bf16;
  return fmt::format(
      "model.weights: {} of {} router weights, such as {}, have values that {} rounds; routers "
      "compute with rounded weights, so some choices of experts may differ from those of "
      "transformers, which may keep routers in fp32; to keep all bits set {} to false",
      rounded_.size(), routers_.size(), *rounded_.begin(), bf16 ? "bf16" : "fp16",
      bf16 ? "bf16.enabled" : "fp16.enabled");
}

}  // namespace ballast::train
