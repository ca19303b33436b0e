#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/engine/blueprint.h"
#include "ballast/model/family.h"

#include "src/model/description/layer_spec.h"

namespace ballast::engine::state_layout_test {
namespace {

using cpu_adam::Codes;
using cpu_adam::Moments;
using cpu_adam::Optimizer;
using Format = Moments::Format;

constexpr std::array kFormats = {Format::f32, Format::bf16_first, Format::blockwise8};

/// The arrays that a block keeps, in the order of their addresses.
std::vector<StateArray> arrays_of(const StateLayout& layout) {
  std::vector<StateArray> arrays;
  for (const StateArray& array : {layout.master, layout.first, layout.second,
                                  layout.first_exponents, layout.second_exponents}) {
    if (array.bytes > 0) arrays.push_back(array);
  }
  std::sort(arrays.begin(), arrays.end(),
            [](const auto& a, const auto& b) { return a.offset < b.offset; });
  return arrays;
}

template <class Check>
void for_every_layout(const Check& check) {
  for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
    for (const cpu_adam::OptimizerRow& row : cpu_adam::kOptimizers) {
      const Optimizer optimizer = row.type;
      for (const Format format : kFormats) {
        for (const Elems elements : {Elems{1}, Elems{2048}, Elems{100'000}, Elems{1} << 20U}) {
          SCOPED_TRACE(std::string(to_string(type)) + ", " + std::string(to_string(optimizer)) +
                       ", format " + std::to_string(static_cast<int>(format)) + ", " +
                       std::to_string(elements) + " elements");
          check(StateLayout(type, {optimizer, format}, elements));
        }
      }
    }
  }
}

TEST(StateLayout, ArraysAreAlignedAndInsideWholePages) {
  for_every_layout([](const StateLayout& layout) {
    const auto arrays = arrays_of(layout);
    Bytes end = 0;
    for (const StateArray& array : arrays) {
      EXPECT_EQ(array.offset % kCacheLine, 0U);
      EXPECT_GE(array.offset, end);
      end = array.offset + array.bytes;
    }
    EXPECT_LE(end, layout.state_bytes);
    EXPECT_EQ(layout.state_bytes % kPage, 0U);
    EXPECT_LT(layout.state_bytes - end, kPage);
  });
}

TEST(StateLayout, ArraysOfWholePagesAreFarFromEachOtherInTheSetsOfTheFirstCache) {
  for_every_layout([](const StateLayout& layout) {
    if (layout.elements % kPage != 0) return;
    // The weights and the gradient start on a page.
    std::vector<Bytes> lines = {0};
    for (const StateArray& array : arrays_of(layout)) {
      if (array.bytes < layout.elements) continue;  // exponents: one byte per 256 elements
      lines.push_back(array.offset % kPage / kCacheLine);
    }
    constexpr Bytes kLines = kPage / kCacheLine;
    constexpr Bytes kFar = 12;
    for (std::size_t i = 0; i < lines.size(); ++i) {
      for (std::size_t j = i + 1; j < lines.size(); ++j) {
        const Bytes distance = (lines[i] + kLines - lines[j]) % kLines;
        EXPECT_GE(distance, kFar) << i << ", " << j;
        EXPECT_LE(distance, kLines - kFar) << i << ", " << j;
      }
    }
  });
}

/// The address bits by which Zen's L1 cache selects the way; see cpu_adam::kArraySkew.
std::uint64_t way_tag(std::uint64_t address) {
  constexpr std::pair<unsigned, unsigned> kBits[] = {{12, 27}, {13, 26}, {14, 25}, {15, 20},
                                                     {16, 21}, {17, 22}, {18, 23}, {19, 24}};
  std::uint64_t tag = 0;
  for (const auto& [low, high] : kBits) {
    tag = (tag << 1U) | (((address >> low) ^ (address >> high)) & 1U);
  }
  return tag;
}

TEST(StateLayout, MomentsOfBlocksOfPowersOfTwoNeverShareTheirTagInTheFirstCache) {
  for (unsigned power = 20; power <= 34; ++power) {
    for (const Elems factor : {Elems{1}, Elems{3}, Elems{5}, Elems{7}}) {
      const StateLayout layout(DType::bf16, {}, factor << power);
      for (Bytes start = 0; start < (Bytes{1} << 20U); start += kPage) {
        const Bytes place = start + layout.first.offset;
        const Bytes other = start + layout.second.offset;
        EXPECT_NE(way_tag(place), way_tag(other)) << factor << " * 2^" << power << ", " << start;
      }
    }
  }
}

/// Bytes per element of a large block, weights included, without the gaps between arrays.
double bytes_per_element(DType type, Optimizer optimizer, Format format) {
  constexpr Elems kElements = Elems{1} << 24U;
  const StateLayout layout(type, {optimizer, format}, kElements);
  Bytes sum = layout.weight_bytes;
  for (const StateArray& array : arrays_of(layout)) sum += array.bytes;
  EXPECT_LE(layout.weight_bytes + layout.state_bytes - sum, 5 * cpu_adam::kArraySkew + kPage);
  return static_cast<double>(sum) / static_cast<double>(kElements);
}

TEST(StateLayout, OfALargeBlockHasTheBytesOfItsFormat) {
  constexpr double kShared = 1.0 / static_cast<double>(Codes::kBlock);
  for (const Optimizer optimizer : {Optimizer::adamw, Optimizer::adam}) {
    EXPECT_EQ(bytes_per_element(DType::bf16, optimizer, Format::f32), 12.0);
    EXPECT_EQ(bytes_per_element(DType::f32, optimizer, Format::f32), 12.0);
    EXPECT_EQ(bytes_per_element(DType::bf16, optimizer, Format::bf16_first), 10.0);
    EXPECT_EQ(bytes_per_element(DType::bf16, optimizer, Format::blockwise8), 6.0 + 2 * kShared);
  }
  for (const Optimizer optimizer : {Optimizer::adagrad, Optimizer::lion, Optimizer::sgd}) {
    EXPECT_EQ(bytes_per_element(DType::bf16, optimizer, Format::f32), 8.0);
    EXPECT_EQ(bytes_per_element(DType::bf16, optimizer, Format::blockwise8), 5.0 + kShared);
  }
  EXPECT_EQ(bytes_per_element(DType::bf16, Optimizer::lion, Format::bf16_first), 6.0);
}

TEST(StateLayout, TheShardPointsToTheArraysThatAreKept) {
  alignas(64) std::array<std::byte, 64> weights{};
  std::vector<std::byte> states(1 << 20);
  const std::array<std::byte, 64> gradient{};
  for_every_layout([&](const StateLayout& layout) {
    Blueprint blueprint;
    blueprint.type = layout.type;
    blueprint.states = layout.format;
    for (const Elems elements : {Elems{300}, layout.elements}) {
      model::BlockSpec& block = blueprint.model.blocks.emplace_back();
      block.elements = elements;
      block.number = blueprint.model.blocks.size() - 1;
      blueprint.problem.blocks.emplace_back();
    }
    blueprint.first_elements = {0, 512};
    const auto shard = make_shard(blueprint, 1, 0, weights.data(), states.data(), gradient.data());
    const auto place = [&](const StateArray& array) -> const void* {
      return array.bytes == 0 ? nullptr : states.data() + array.offset;
    };
    EXPECT_EQ(shard.size, layout.elements);
    EXPECT_EQ(shard.first_element, 512U);
    const bool half = layout.type == DType::f16;  // a copy of the master
    EXPECT_EQ(shard.weights.main, half ? place(layout.master) : weights.data());
    EXPECT_EQ(shard.weights.remainder_or_copy, half ? weights.data() : place(layout.master));
    using Weights = cpu_adam::Weights::Format;
    EXPECT_EQ(shard.weights.format, half                         ? Weights::copy_f16
                                    : layout.type == DType::bf16 ? Weights::split
                                                                 : Weights::plain);
    EXPECT_EQ(shard.gradient.type, layout.type);
    EXPECT_EQ(shard.gradient.data, gradient.data());
    EXPECT_EQ(shard.moments.format, layout.format.moments);
    EXPECT_EQ(shard.moments.first, place(layout.first));
    EXPECT_EQ(shard.moments.second, place(layout.second));
    EXPECT_EQ(shard.moments.first_exponents, place(layout.first_exponents));
    EXPECT_EQ(shard.moments.second_exponents, place(layout.second_exponents));
    EXPECT_EQ(shard.moments.first != nullptr, has_first_moment(layout.format.optimizer));
    EXPECT_EQ(shard.moments.second != nullptr, has_second_moment(layout.format.optimizer));
  });
}

/// A block of 100,000 elements, for one rank of stage 1.
Blueprint cut_block(std::uint32_t world, std::uint32_t rank, Elems sub_group_size) {
  Blueprint blueprint;
  blueprint.mesh = {.data = world, .rank = rank};
  blueprint.sub_group_size = sub_group_size;
  blueprint.model.config.vocabulary_tiles = 1;
  blueprint.model.layers = std::make_shared<const std::vector<model::LayerSpec>>();
  blueprint.model.blocks = {{.kind = model::BlockKind::embedding, .elements = 100'000},
                            {.kind = model::BlockKind::head, .number = 1}};
  blueprint.problem.sharers = world;
  blueprint.problem.stage = 1;
  size_problem(blueprint, {});
  return blueprint;
}

TEST(StateLayout, SubGroupsAreWholeUnitsAndTogetherTheShard) {
  for (const std::uint32_t world : {1U, 3U, 60U}) {
    for (const Elems size : {Elems{1}, Elems{2048}, Elems{5000}, Elems{1} << 40U}) {
      std::uint32_t groups = 0;
      for (std::uint32_t rank = 0; rank < world; ++rank) {
        const Blueprint blueprint = cut_block(world, rank, size);
        const ShardRange shard = rank_shard(blueprint, 0);
        if (rank == 0) groups = sub_groups(blueprint, 0);
        EXPECT_EQ(sub_groups(blueprint, 0), groups);
        Elems elements = 0;
        Elems room = 0;
        for (std::uint32_t g = 0; g < groups; ++g) {
          const ShardRange group = sub_group_range(blueprint, 0, g);
          EXPECT_EQ(group.first, shard.first + elements);
          EXPECT_GT(group.room, 0U);
          EXPECT_LE(group.room, std::max(size, kSubGroupUnit));
          EXPECT_EQ(g + 1 < groups ? group.room % kSubGroupUnit : 0, 0U);
          elements += group.elements;
          room += group.room;
          EXPECT_EQ(blueprint.problem.blocks[0].sub_groups[g].state_bytes,
                    state_layout(blueprint, 0, g).state_bytes);
        }
        EXPECT_EQ(elements, shard.elements);
        EXPECT_EQ(room, shard.room);
      }
    }
  }
}

TEST(StateLayout, ASubGroupPointsIntoTheWeightsAndGradientsOfItsBlock) {
  const Blueprint blueprint = cut_block(3, 1, 5000);
  std::vector<std::byte> states(1 << 20);
  std::vector<std::byte> weights(200'000);
  const std::vector<std::byte> gradient(200'000);
  const auto shard = make_shard(blueprint, 0, 2, weights.data(), states.data(), gradient.data());
  EXPECT_EQ(shard.size, 4096U);
  EXPECT_EQ(shard.first_element, rank_shard(blueprint, 0).first + 8192);
  EXPECT_EQ(shard.weights.main, weights.data() + Bytes{2} * 8192);
  EXPECT_EQ(shard.gradient.data, gradient.data() + Bytes{2} * 8192);
  EXPECT_EQ(shard.weights.remainder_or_copy,
            states.data() + state_layout(blueprint, 0, 2).master.offset);
}

model::ModelConfig small_experts() {
  model::ModelConfig config = model::default_config("gpt_oss");  // its experts have biases
  config.vocab_size = 61;
  config.hidden_size = 48;
  config.num_layers = 1;
  config.num_heads = 6;
  config.num_kv_heads = 2;
  config.intermediate_size = 40;
  config.max_sequence = 32;
  config.details["num_local_experts"] = 6;
  return config;
}

/// Whether each element's tensor is exempt from weight decay, by element of the model. Padding is
/// not checked.
std::vector<int> exempt_elements(const model::Architecture& model) {
  std::vector<int> exempt;
  for (const model::BlockSpec& block : model::whole_blocks(model)) {
    const std::size_t first = exempt.size();
    exempt.resize(first + round_up(block.elements, cpu_adam::Codes::kBlock), -1);
    for (const model::TensorSpec& tensor : block.tensors) {
      const auto start = exempt.begin() + static_cast<std::ptrdiff_t>(first + tensor.offset);
      std::fill_n(start, tensor.size, tensor.undecayed ? 1 : 0);
    }
  }
  return exempt;
}

TEST(StateLayout, AShardNamesItsElementsWithoutWeightDecay) {
  for (const std::uint64_t sharing : {1U, 3U}) {
    model::Architecture model = model::build_architecture(small_experts(), {.experts = sharing});
    const std::vector<std::string> patterns = {"transformers", "lm_head.weight"};
    exempt_from_decay(model, patterns, [](std::size_t, const std::string&) { FAIL(); });
    const std::vector<int> exempt = exempt_elements(model);
    std::vector<int> seen(exempt.size(), 0);
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      Blueprint blueprint;
      blueprint.model = model;
      blueprint.mesh = {.data = 3, .rank = rank};
      blueprint.sub_group_size = 2048;
      blueprint.problem.sharers = 3;
      blueprint.problem.stage = 1;
      size_problem(blueprint, {});
      for (std::size_t b = 0; b < model.blocks.size(); ++b) {
        for (std::uint32_t group = 0; group < sub_groups(blueprint, b); ++group) {
          const auto shard = make_shard(blueprint, b, group, nullptr, nullptr, nullptr);
          for (Elems i = 0; i < shard.size; ++i) {
            const Elems number = shard.first_element + i;
            const auto has = [&](const auto& r) { return r.first <= number && number < r.end; };
            const int found = std::ranges::any_of(shard.undecayed, has) ? 1 : 0;
            if (exempt[number] >= 0) {
              ASSERT_EQ(found, exempt[number]) << "element " << number;
            }
            seen[number] += 1;
          }
        }
      }
    }
    for (std::size_t i = 0; i < exempt.size(); ++i) {
      if (exempt[i] >= 0) {
        ASSERT_EQ(seen[i], 1) << "element " << i;
      }
    }
  }
}

}  // namespace
}  // namespace ballast::engine::state_layout_test
