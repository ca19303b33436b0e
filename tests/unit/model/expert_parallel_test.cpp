#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/model/architecture.h"
#include "ballast/model/family.h"

#include "src/model/compute/expert_exchange.h"

namespace ballast::model::expert_parallel_test {
namespace {

ModelConfig with_experts(const std::string& family) {
  ModelConfig c = default_config(family);
  c.hidden_size = 6;
  c.num_heads = 3;
  c.num_layers = 2;
  c.intermediate_size = 5;
  c.details[family == "gpt_oss" ? "num_local_experts" : "num_experts"] = std::uint64_t{6};
  return c;
}

void expect_equal(const BlockSpec& one, const BlockSpec& other) {
  EXPECT_EQ(one.name, other.name);
  EXPECT_EQ(one.expert, other.expert) << one.name;
  EXPECT_EQ(one.number, other.number) << one.name;
  EXPECT_EQ(one.parameters, other.parameters) << one.name;
  EXPECT_EQ(one.elements, other.elements) << one.name;
  EXPECT_EQ(one.frozen_elements, other.frozen_elements) << one.name;
  EXPECT_EQ(one.product_elements, other.product_elements) << one.name;
  EXPECT_EQ(one.last_product_elements, other.last_product_elements) << one.name;
  ASSERT_EQ(one.tensors.size(), other.tensors.size()) << one.name;
  for (std::size_t t = 0; t < one.tensors.size(); ++t) {
    EXPECT_EQ(one.tensors[t].name, other.tensors[t].name);
    EXPECT_EQ(one.tensors[t].offset, other.tensors[t].offset) << one.tensors[t].name;
    EXPECT_EQ(one.tensors[t].first_row, other.tensors[t].first_row) << one.tensors[t].name;
  }
}

TEST(ExpertParallelism, PutsAnExpertOfEachRankIntoOneBlock) {
  for (const std::string family : {"qwen2_moe", "gpt_oss"}) {
    for (const bool frozen : {false, true}) {
      Architecture whole = build_architecture(with_experts(family), {.experts = 1});
      Architecture shared = build_architecture(with_experts(family), {.experts = 3});
      EXPECT_EQ(count_blocks(shared.config, {.experts = 3}), shared.blocks.size());
      EXPECT_EQ(shared.blocks.size(), whole.blocks.size() - 2 * (6 - 2));
      const std::vector<std::string> attention = {"*self_attn*"};
      for (Architecture* const model : {&whole, &shared}) {
        if (frozen) freeze(*model, attention, [](std::size_t, const std::string&) { FAIL(); });
      }
      EXPECT_EQ(shared.parameters(), whole.parameters());
      EXPECT_EQ(shared.trained_parameters(), whole.trained_parameters());
      const std::vector<BlockSpec> blocks = whole_blocks(shared);
      ASSERT_EQ(blocks.size(), whole.blocks.size());
      for (std::size_t b = 0; b < blocks.size(); ++b) expect_equal(blocks[b], whole.blocks[b]);
      const BlockSpec& last = shared.blocks[shared.head() - 1];
      EXPECT_EQ(last.name, "layer 1 experts 3-5");
      EXPECT_EQ(last.own_elements() * 3, last.elements);
      EXPECT_EQ(last.own_elements(), whole.blocks[whole.head() - 1].elements);
    }
  }
}

TEST(ExpertParallelism, NeedsExpertsOfEqualSize) {
  const ModelConfig dense =
      without_experts(build_architecture(with_experts("gpt_oss"), {.experts = 3}).config);
  EXPECT_EQ(build_architecture(dense).blocks.size(), 4U);
}

TEST(ExpertParallelism, RefusesExpertsThatRanksCannotShare) {
  const auto refusal = [](const ModelConfig& config, std::uint64_t ranks,
                          const std::vector<std::string>& trained) {
    try {
      Architecture model = build_architecture(config, {.experts = ranks});
      freeze(model, trained, [](std::size_t, const std::string& rule) {
        throw Error(ErrorCategory::config, rule);
      });
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const std::vector<std::string> maps = {"*down_proj*"};
  EXPECT_NE(refusal(with_experts("qwen2_moe"), 4, {}).find("4 ranks cannot share 6 experts"),
            std::string::npos);
  EXPECT_NE(
      refusal(with_experts("qwen2_moe"), 2, maps).find("train all tensors of experts or none"),
      std::string::npos);
  EXPECT_EQ(refusal(with_experts("qwen2_moe"), 1, maps), "");
  ModelConfig llama = with_experts("llama");
  llama.details.erase("num_experts");
  EXPECT_NE(refusal(llama, 2, {}).find("has no experts"), std::string::npos);
}

TEST(ExpertParallelism, MovesAllChoicesInRoundsOfLimitedSize) {
  const SharedChoices choices = {
      .sent = {{0, 5}, {5, 0}, {5, 2}}, .received = {3, 5, 0}, .most = 7};
  const std::vector<ExchangeRound> rounds = ExchangeRound::all(choices, 2);
  ASSERT_EQ(rounds.size(), 4U);  // another rank has 7 choices for one expert
  const auto sent = [&](std::size_t round) {
    std::vector<std::size_t> found;
    for (const ExpertChoices& part : rounds[round].sent) {
      found.push_back(part.count == 0 ? 0 : 100 * part.first + part.count);
    }
    return found;
  };
  using Sizes = std::vector<std::size_t>;
  EXPECT_EQ(sent(0), (Sizes{2, 0, 502}));
  EXPECT_EQ(sent(2), (Sizes{401, 0, 0}));
  EXPECT_EQ(sent(3), (Sizes{0, 0, 0}));
  EXPECT_EQ(rounds[0].received, (Sizes{2, 2, 0}));
  EXPECT_EQ(rounds[1].received, (Sizes{1, 2, 0}));
  EXPECT_EQ(rounds[2].received_rows, 1U);
  EXPECT_EQ(rounds[3].received_rows, 0U);
  EXPECT_TRUE(ExchangeRound::all({.sent = {{0, 0}}, .received = {0}}, 2).empty());
}

}  // namespace
}  // namespace ballast::model::expert_parallel_test
