#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ballast/cpu_adam/updater.h"

#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/tiny_training.h"

// The invariant of the whole engine for every optimizer and every format of its states: their tier
// and the device of their update do not change a single bit of the results.

namespace ballast::engine::optimizers_test {
namespace {

const std::string kModel = R"("family": "llama", "vocab_size": 131, "hidden_size": 64,
                              "num_layers": 2, "num_heads": 4, "intermediate_size": 96)";
constexpr std::uint64_t kSteps = 15;
constexpr std::uint64_t kFewSteps = 6;

/// `optimizer` sections with learning rates at which the model learns, one for each row of
/// cpu_adam::kOptimizers.
const std::map<std::string, std::string> kOptimizers = {
    {"AdamW", R"({"type": "AdamW", "params": {"lr": 0.003, "weight_decay": 0.1}})"},
    {"Adam", R"({"type": "Adam", "params": {"lr": 0.003, "weight_decay": 0.001,
                                            "adam_w_mode": false}})"},
    {"Adagrad", R"({"type": "Adagrad", "params": {"lr": 0.02, "weight_decay": 0.001}})"},
    {"Lion", R"({"type": "Lion", "params": {"lr": 0.001, "weight_decay": 0.1}})"},
    {"SGD", R"({"type": "SGD", "params": {"lr": 0.3, "momentum": 0.9, "nesterov": true,
                                          "weight_decay": 0.001}})"},
    {"Adamax", R"({"type": "Adamax", "params": {"lr": 0.003, "weight_decay": 0.001}})"}};

struct Case {
  std::string optimizer;
  bool bf16 = true;
  std::string states = "fp32";
};

std::string name_of(const Case& one) {
  return fmt::format("{}_{}_states_{}", one.optimizer, one.bf16 ? "bf16" : "fp32", one.states);
}

test::Outcome train(const Case& one, std::uint64_t steps,
                    const std::vector<std::string>& overrides) {
  const test::TempDir directory;
  std::vector<std::string> all = {"optimizer=" + kOptimizers.at(one.optimizer),
                                  "ballast.optimizer_states=" + one.states,
                                  "ballast.compute_threads=1"};
  all.insert(all.end(), overrides.begin(), overrides.end());
  return test::train(test::tiny_config(kModel, one.bf16, directory.path(), all), steps,
                     test::chained_ids);
}

/// The reference run of a case: one operation at a time, all on the device. Trained once.
const test::Outcome& reference(const Case& one, std::uint64_t steps = kSteps) {
  static std::map<std::pair<std::string, std::uint64_t>, test::Outcome> outcomes;
  const auto [found, is_new] = outcomes.try_emplace({name_of(one), steps});
  if (is_new) found->second = train(one, steps, {"ballast.serial=true"});
  return found->second;
}

std::vector<Case> cases() {
  std::vector<Case> list;
  for (const cpu_adam::OptimizerRow& row : cpu_adam::kOptimizers) {
    const std::string optimizer(row.title);
    for (const char* states : {"fp32", "bf16_first", "8bit"}) {
      if (!has_first_moment(row.type) && std::string(states) == "bf16_first") continue;
      list.push_back({optimizer, true, states});
    }
    list.push_back({optimizer, false, "fp32"});
  }
  list.push_back({"AdamW", false, "bf16_first"});
  list.push_back({"AdamW", false, "8bit"});
  return list;
}

class Optimizers : public testing::TestWithParam<Case> {};

TEST_P(Optimizers, GiveTheSameBitsForEveryPlacementAndUpdater) {
  const std::string nvme = "zero_optimization.offload_optimizer.device=nvme";
  const std::string weights = "zero_optimization.offload_param.device=";
  std::vector<std::vector<std::string>> variants = {
      {},
      {nvme, "ballast.update_threads=3"},
      {nvme, weights + "nvme", "zero_optimization.offload_optimizer.buffer_count=1"},
      {weights + "cpu", R"(ballast.placement=[{"blocks": 1, "optimizer": "host"},
                                              {"blocks": 2, "optimizer": "nvme"}])"}};
  for (const Isa isa : cpu_adam::available()) {
    if (isa == cpu_adam::active()) continue;  // the other runs use it
    variants.push_back({nvme, fmt::format("ballast.update_isa={}", to_string(isa))});
  }
  const test::Outcome& expected = reference(GetParam(), kFewSteps);
  for (const auto& variant : variants) {
    std::string name;
    for (const auto& override_text : variant) name += override_text + " ";
    test::expect_same(train(GetParam(), kFewSteps, variant), expected, name);
  }
}

TEST_P(Optimizers, LowerTheLoss) {
  const auto& losses = reference(GetParam()).losses;
  EXPECT_LT(losses.back(), losses.front() - 0.3);
}

TEST_P(Optimizers, HaveDifferentLosses) {
  for (const Case& other : cases()) {
    if (name_of(other) == name_of(GetParam())) continue;
    EXPECT_NE(reference(other).losses, reference(GetParam()).losses) << name_of(other);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Optimizers, testing::ValuesIn(cases()),
                         [](const auto& info) { return name_of(info.param); });

TEST(OptimizerParameters, EachReachesTheUpdate) {
  const std::map<std::string, std::vector<std::string>> changes = {
      {"AdamW",
       {"lr=0.004", "betas=[0.8, 0.999]", "betas=[0.9, 0.99]", "eps=1e-3", "weight_decay=0.2"}},
      {"Adam",
       {"lr=0.004", "betas=[0.8, 0.999]", "betas=[0.9, 0.99]", "eps=1e-3", "weight_decay=0.1",
        "adam_w_mode=true"}},
      {"Adagrad", {"lr=0.03", "eps=1e-3", "weight_decay=0.1"}},
      {"Lion", {"lr=0.002", "betas=[0.5, 0.99]", "betas=[0.9, 0.5]", "weight_decay=0.2"}},
      {"SGD", {"lr=0.2", "momentum=0.8", "nesterov=false", "weight_decay=0.1"}},
      {"Adamax",
       {"lr=0.004", "betas=[0.8, 0.999]", "betas=[0.9, 0.5]", "eps=1e-3", "weight_decay=0.1"}}};
  constexpr std::uint64_t kShort = 4;
  for (const cpu_adam::OptimizerRow& row : cpu_adam::kOptimizers) {
    const std::string optimizer(row.title);
    const std::vector<std::string>& parameters = changes.at(optimizer);
    for (const cpu_adam::HyperParameter& own : row.parameters) {
      const auto changes_it = [&](const std::string& text) { return text.starts_with(own.name); };
      EXPECT_TRUE(std::ranges::any_of(parameters, changes_it)) << optimizer << ", " << own.name;
    }
    const test::Outcome usual = train({optimizer, false, "fp32"}, kShort, {});
    for (const auto& parameter : parameters) {
      const test::Outcome other =
          train({optimizer, false, "fp32"}, kShort, {"optimizer.params." + parameter});
      EXPECT_NE(other.losses, usual.losses) << optimizer << ", " << parameter;
    }
  }
}

TEST(WeightDecay, ExemptsTheSameTensorsInEveryPlacement) {
  constexpr std::uint64_t kShort = 4;
  const std::string decay = "optimizer.params.weight_decay=0.9";
  const std::string without = R"(ballast.weight_decay_exclude=["transformers", "*embed*"])";
  for (const Case& one : {Case{"Adam", true, "8bit"}, Case{"AdamW", true, "fp32"}}) {
    const test::Outcome all = train(one, kShort, {decay});
    const test::Outcome expected = train(one, kShort, {decay, without});
    EXPECT_NE(expected.losses, all.losses);
    for (const char* placement : {"zero_optimization.offload_optimizer.device=nvme",
                                  R"(ballast.placement=[{"blocks": 1, "optimizer": "host"}])"}) {
      test::expect_same(train(one, kShort,
                              {decay, without, placement, "zero_optimization.sub_group_size=2048",
                               "ballast.speculative_updates=4"}),
                        expected, placement);
    }
  }
}

TEST(OptimizerStates, InEightBitsReachTheLossOfFp32WithinOnePercent) {
  constexpr std::uint64_t kLong = 150;
  const std::string optimizer = "zero_optimization.offload_optimizer.device=cpu";
  const double full = train({"AdamW", true, "fp32"}, kLong, {optimizer}).losses.back();
  const double eight = train({"AdamW", true, "8bit"}, kLong, {optimizer}).losses.back();
  EXPECT_LT(full, 2.0) << "too little was learnt to compare";
  EXPECT_NE(eight, full);
  EXPECT_NEAR(eight / full, 1.0, 0.01) << eight << " and " << full;
}

}  // namespace
}  // namespace ballast::engine::optimizers_test
