#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/model/architecture.h"
#include "ballast/model/family.h"

namespace ballast::model {
namespace {

/// Fields that are sums over the tensors of a block.
constexpr std::array kBlockSums = {&BlockSpec::parameters,
                                   &BlockSpec::elements,
                                   &BlockSpec::frozen_elements,
                                   &BlockSpec::product_elements,
                                   &BlockSpec::last_product_elements,
                                   &BlockSpec::frozen_product_elements};

/// Adds the next expert of the same layer to a block of experts.
void add_expert(BlockSpec& block, const BlockSpec& next) {
  for (TensorSpec tensor : next.tensors) {
    tensor.offset += block.elements;
    block.tensors.push_back(std::move(tensor));
  }
  for (const auto sum : kBlockSums) block.*sum += next.*sum;
  ++block.experts;
  block.name = fmt::format("layer {} experts {}-{}", block.layer, block.expert,
                           block.expert + block.experts - 1);
}

}  // namespace

std::vector<BlockSpec> layer_blocks(const ModelConfig& config, std::uint64_t index,
                                    std::uint64_t expert_ranks) {
  const Family& described = family(config.family);
  const std::uint64_t experts = described.experts_of_layer(config, index);
  if (experts % expert_ranks != 0) {
    throw Error(ErrorCategory::config,
                fmt::format("ballast.expert_parallel: {} ranks cannot share {} experts equally; "
                            "set it to 1 to keep all experts on every rank",
                            expert_ranks, experts));
  }
  std::vector<BlockSpec> blocks;
  for (BlockSpec& block : described.blocks_of_layer(config, index)) {
    block.layer = index;
    const bool joins = block.part == LayerPart::expert && block.expert % expert_ranks != 0;
    if (joins) {
      add_expert(blocks.back(), block);
    } else {
      blocks.push_back(std::move(block));
    }
  }
  return blocks;
}

std::vector<BlockSpec> blocks_without_expert_parallelism(const Architecture& model) {
  std::vector<BlockSpec> blocks;
  for (const BlockSpec& block : model.blocks) {
    const std::size_t tensors = block.tensors.size() / block.experts;
    for (std::uint64_t e = 0; e < block.experts; ++e) {
      BlockSpec& one = blocks.emplace_back(block);
      if (block.experts == 1) continue;
      one.name = fmt::format("layer {} expert {}", block.layer, block.expert + e);
      one.expert += e;
      one.number += e;
      one.experts = 1;
      const auto first = block.tensors.begin() + static_cast<std::ptrdiff_t>(e * tensors);
      one.tensors.assign(first, first + static_cast<std::ptrdiff_t>(tensors));
      for (TensorSpec& tensor : one.tensors) tensor.offset -= e * block.own_elements();
      for (const auto sum : kBlockSums) one.*sum /= block.experts;
    }
  }
  return blocks;
}

}  // namespace ballast::model
