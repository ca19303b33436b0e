#pragma once

#include <cstdint>

#include "ballast/model/architecture.h"
#include "ballast/model/family.h"

#include "src/model/description/layer_rules.h"
#include "src/model/description/layer_spec.h"

namespace ballast::test {

inline model::LayerSpec layer_of(const model::ModelConfig& config, std::uint64_t index) {
  return model::family(config.family).layer(config, index);
}
/// The attention of a layer that has it.
inline model::AttentionSpec attention_of(const model::ModelConfig& config, std::uint64_t index) {
  return *layer_of(config, index).find<model::AttentionSpec>();
}
/// The first block of a layer.
inline model::BlockSpec block_of(const model::ModelConfig& config, std::uint64_t index) {
  return model::blocks_of(layer_of(config, index), config, index).front();
}

}  // namespace ballast::test
