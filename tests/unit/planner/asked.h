#pragma once

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/setup/setup.h"

#include "tests/support/random_run.h"

namespace ballast::test {

using planner::Decision;
using planner::PlanRequest;

/// A run of a small model with open tiers and micro-batches.
inline config::Config make_config(const std::vector<std::string>& overrides) {
  const std::string text = R"({
    "model": {"family": "gpt2", "vocab_size": 512, "hidden_size": 128, "num_layers": 10,
              "num_heads": 4},
    "data": {"text": "unused.txt", "sequence_length": 64},
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": "auto",
    "zero_optimization": {"offload_optimizer": {"device": "auto"},
                          "offload_param": {"device": "auto"}},
    "ballast": {"device": "host"}})";
  return config::parse(text, "/base", "test", overrides);
}

/// Round numbers that grow with the micro-batch, like the memory of kernels.
inline model::KernelSizes kernels(const model::Architecture& model, model::MicroBatchShape shape) {
  return {.workspace = shape.tokens() * 4096,
          .intermediates = std::vector<Bytes>(model.blocks.size(), shape.tokens() * 2048)};
}

struct Asked {
  explicit Asked(const std::vector<std::string>& overrides = {}, memory::Budgets given = {})
      : config(make_config(overrides)),
        model(model::build_architecture(config.model)),
        budgets(given) {}

  [[nodiscard]] PlanRequest request() const {
    PlanRequest request = setup::plan_request(config, mesh.ranks());
    request.budgets = budgets;
    request.rates = rates;
    // Tiles need further sizes, for which the real kernels are asked.
    if (model.config.vocabulary_tiles > 1 || model.config.layer_tiles > 1) return request;
    request.kernels = [model = model](model::MicroBatchShape shape) {
      return kernels(model, shape);
    };
    return request;
  }
  [[nodiscard]] Decision decide() const { return planner::decide(request()); }
  /// The config with the choices of `decision`.
  [[nodiscard]] config::Config settled(const Decision& decision) const {
    return setup::settle(config, decision.blueprint);
  }
  /// The message of the refusal; "" when it fits.
  [[nodiscard]] std::string refusal() const {
    try {
      static_cast<void>(decide());
    } catch (const Error& error) {
      EXPECT_EQ(error.category(), ErrorCategory::memory);
      return error.what();
    }
    return "";
  }

  config::Config config;
  model::Architecture model;
  memory::Budgets budgets;
  plan::Rates rates = quick_machine();
  Mesh mesh = {};
};

inline constexpr memory::Budgets kRoomy = {256 * kMiB, 256 * kMiB};
inline constexpr memory::Budgets kTight = {14 * kMiB, 12 * kMiB};

}  // namespace ballast::test
