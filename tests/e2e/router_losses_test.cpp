#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/config/config.h"
#include "ballast/engine/engine.h"
#include "ballast/formats/safetensors.h"
#include "ballast/setup/setup.h"

#include "tests/support/device_kind.h"
#include "tests/support/expect_error.h"
#include "tests/support/fixtures.h"
#include "tests/support/function_weights.h"
#include "tests/support/stored_values.h"
#include "tests/support/tags.h"
#include "tests/support/temp_dir.h"
#include "tests/support/thread_channels.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/tiny_training.h"

// Router losses of a whole step, compared with transformers' loss of the whole batch.
// tests/data/make_router_loss_fixture.py makes the fixture.

namespace ballast::engine::router_losses_test {
namespace {

using nlohmann::json;
using Overrides = std::vector<std::string>;

constexpr double kRate = 4096.0;  // so large that the update has the precision of the gradient

std::filesystem::path fixture(const std::string& name) {
  return test::fixture("router_losses") / name;
}

const json& record() {
  static const json all = [] {
    json read;
    std::ifstream(fixture("batch.json")) >> read;
    return read;
  }();
  return all;
}

/// One batch in `micro_batches` parts on each of `ranks` ranks.
struct Division {
  std::uint64_t micro_batches = 1;
  std::uint32_t ranks = 1;
  Overrides overrides = {};

  [[nodiscard]] std::string name() const {
    return fmt::format("{} micro-batches, {} ranks", micro_batches, ranks);
  }
};

config::Config config_of(const Division& how, const std::filesystem::path& out) {
  const auto& tokens = record()["tokens"];
  const json text = {
      {"model", record()["model"]},
      {"data", {{"tokens", {"unused"}}, {"sequence_length", tokens[0].size() - 1}}},
      {"optimizer", {{"type", "SGD"}, {"params", {{"lr", kRate}, {"weight_decay", 0}}}}},
      {"bf16", {{"enabled", false}}},
      {"gradient_clipping", 0},
      {"train_micro_batch_size_per_gpu", tokens.size() / how.micro_batches / how.ranks},
      {"gradient_accumulation_steps", how.micro_batches},
      {"ballast",
       {{"device", test::device_kind()},
        {"device_bytes", "128MiB"},
        {"host_bytes", "64MiB"},
        {"out", out.string()}}}};
  return config::parse(text.dump(), out, "router losses", how.overrides, how.ranks);
}

test::Batch whole_batch() {
  test::Batch batch;
  for (const std::vector<std::int32_t> sequence : record()["tokens"]) {
    batch.tokens.insert(batch.tokens.end(), sequence.begin(), sequence.end() - 1);
    batch.targets.insert(batch.targets.end(), sequence.begin() + 1, sequence.end());
  }
  return batch;
}

struct Found {
  StepResult step;
  std::vector<std::vector<double>> gradients;  ///< by tensor, in the order of the model
  std::vector<std::vector<float>> weights;     ///< after the step
};

double relative_error(const std::vector<double>& ours, const std::vector<double>& theirs) {
  double error = 0.0;
  double size = 0.0;
  for (std::size_t i = 0; i < theirs.size(); ++i) {
    error += (ours[i] - theirs[i]) * (ours[i] - theirs[i]);
    size += theirs[i] * theirs[i];
  }
  return std::sqrt(error / size);
}

std::vector<double> joined(const std::vector<std::vector<double>>& parts) {
  std::vector<double> all;
  for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

/// Calls work(block, tensor) for each tensor of the model.
template <class Work>
void for_tensors(const Engine& engine, const Work& work) {
  const auto& blocks = engine.blueprint().model.blocks;
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    for (const model::TensorSpec& tensor : blocks[b].tensors) work(b, tensor);
  }
}

/// One step of plain gradient descent from the weights of the fixture.
Found train(const Division& how, comm::Ranks* ranks) {
  const formats::SafetensorsReader tensors(fixture("batch.safetensors"));
  const test::TempDir directory;
  const config::Config config = config_of(how, directory.path());
  Engine engine = setup::make_engine(config, nullptr, ranks);
  test::start_from(
      engine, {[&](const model::TensorSpec& tensor, Elems first, std::span<float> out) {
        const std::vector<float> values = test::read_tensor(tensors, tensor);
        std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(first), out.size(), out.begin());
      }});
  Found found;
  found.step = engine.train_step(test::part_of(whole_batch(), engine.blueprint()).view(), kRate);
  engine.finish();
  for_tensors(engine, [&](std::size_t block, const model::TensorSpec& tensor) {
    const std::vector<float> before = test::read_tensor(tensors, tensor);
    found.weights.push_back(engine.snapshot().read_weights(block, tensor));
    std::vector<double>& gradient = found.gradients.emplace_back();
    for (std::size_t i = 0; i < before.size(); ++i) {
      gradient.push_back((static_cast<double>(before[i]) - found.weights.back()[i]) / kRate);
    }
  });
  return found;
}

Found train(const Division& how) {
  if (how.ranks == 1) return train(how, nullptr);
  Found first;
  test::ThreadChannels channels(how.ranks);
  test::as_ranks(
      how.ranks,
      [&](comm::Ranks& ranks) {
        Found own = train(how, &ranks);
        if (ranks.rank() == 0) first = std::move(own);
      },
      [&](std::uint32_t rank, auto) { return channels.make(rank); });
  return first;
}

std::vector<std::vector<double>> their_gradients() {
  const formats::SafetensorsReader tensors(fixture("batch.safetensors"));
  const test::TempDir directory;
  const Engine engine = setup::make_engine(config_of({}, directory.path()));
  std::vector<std::vector<double>> gradients;
  for_tensors(engine, [&](std::size_t, const model::TensorSpec& tensor) {
    const std::vector<float> values = test::read_tensor(tensors, tensor, "gradient.");
    gradients.emplace_back(values.begin(), values.end());
  });
  return gradients;
}

std::vector<Division> divisions() {
  if (test::device_kind() == "cuda") return {{1}, {4}};
  const Overrides sharded = {"zero_optimization.stage=3"};
  return {{1}, {2}, {4}, {8}, {1, 2}, {2, 2}, {4, 2}, {1, 4}, {2, 4}, {2, 2, sharded}};
}

TAG_TESTS("emulated", "RouterLosses.OfTheStepAreThoseOfTheWholeBatch");
TEST(RouterLosses, OfTheStepAreThoseOfTheWholeBatch) {
  const std::vector<std::vector<double>> theirs = their_gradients();
  const Found whole = train({});
  for (const Division& how : divisions()) {
    SCOPED_TRACE(how.name());
    const Found found = train(how);
    const double loss = record()["loss"], balance = record()["aux_loss"], z = record()["z_loss"];
    EXPECT_NEAR(found.step.loss, loss, 1e-6 * loss);
    EXPECT_NEAR(found.step.balance_loss, balance, 1e-6 * balance);
    EXPECT_NEAR(found.step.router_z_loss, z, 1e-6 * z);
    EXPECT_NEAR(found.step.grad_norm, whole.step.grad_norm, 1e-6 * whole.step.grad_norm);
    for (std::size_t i = 0; i < theirs.size(); ++i) {
      EXPECT_LT(relative_error(found.gradients[i], theirs[i]), 1e-5) << i;
    }
    // Sums in fp32 have another order: up to 1.2e-6.
    EXPECT_LT(relative_error(joined(found.gradients), joined(whole.gradients)), 2e-6);
  }
}

/// The mean of the losses of parts is another function.
TEST(RouterLosses, OfMicroBatchesAreTheMeanOfTheirLosses) {
  const Overrides by_parts = {"ballast.router_losses=micro_batch"};
  const Found whole = train({});
  for (const std::uint64_t parts : {1, 2, 4, 8}) {
    const Found found = train({parts, 1, by_parts});
    const double mean = record()["mean_aux_loss"][std::to_string(parts)];
    EXPECT_NEAR(found.step.balance_loss, mean, 1e-6 * mean);
    if (parts == 1) continue;
    EXPECT_GT(std::abs(found.step.grad_norm / whole.step.grad_norm - 1.0), 1e-5) << parts;
  }
}

TEST(RouterLosses, OfOneMicroBatchHaveTheBitsOfTheStep) {
  const Found step = train({});
  const Found micro_batch = train({1, 1, {"ballast.router_losses=micro_batch"}});
  EXPECT_EQ(step.weights, micro_batch.weights);
  EXPECT_EQ(step.step.balance_loss, micro_batch.step.balance_loss);
}

/// Without coefficients nothing depends on the span, and the losses are reported all the same.
TEST(RouterLosses, WithoutCoefficientsNeedNoOrder) {
  const Overrides none = {"model.router_aux_loss_coef=0", "model.router_z_loss_coef=0"};
  const Found usual = train({4, 1, none});
  Overrides all = none;
  all.insert(all.end(), {"ballast.order=micro_batch_major", "ballast.router_losses=step"});
  const Found other = train({4, 1, all});
  EXPECT_EQ(usual.weights, other.weights);
  EXPECT_EQ(usual.step.balance_loss, other.step.balance_loss);
  EXPECT_NEAR(usual.step.balance_loss, record()["mean_aux_loss"]["4"].get<double>(), 3e-6);
}

/// Every placement, order of the passes and number of devices gives the same bits.
TEST(RouterLosses, OfTheStepDoNotDependOnPlacement) {
  const std::string zero = "zero_optimization.";
  const std::vector<Overrides> variants = {
      {"pipeline.stages=2"},
      {zero + "offload_param.device=cpu", zero + "offload_optimizer.device=cpu"},
      {"ballast.order=layer_major", "ballast.activations=host", "ballast.delay_seed=7"},
      {zero + "offload_param.device=cpu", "ballast.expert_prefetch=true", "pipeline.stages=2"},
      {"ballast.recompute=true", "ballast.serial=true"}};
  for (const std::uint32_t ranks : {1U, 2U}) {
    const Found expected = train({4, ranks});
    for (const Overrides& variant : variants) {
      const Found found = train({4, ranks, variant});
      EXPECT_EQ(found.weights, expected.weights) << variant.front();
      EXPECT_EQ(found.step.balance_loss, expected.step.balance_loss) << variant.front();
      EXPECT_EQ(found.step.router_z_loss, expected.step.router_z_loss) << variant.front();
    }
  }
}

TEST(RouterLosses, OfTheStepRefuseMicroBatchMajorOrder) {
  const test::TempDir directory;
  for (const std::string order : {"micro_batch_major", "micro_batch_major_offload"}) {
    const auto with = [&](std::uint64_t micro_batches, Overrides overrides) {
      overrides.push_back("ballast.order=" + order);
      return config_of({micro_batches, 1, overrides}, directory.path());
    };
    test::expect_error(ErrorCategory::config,
                       {"ballast.order", order, "ballast.router_losses", "\"micro_batch\""},
                       [&] { with(4, {}); });
    EXPECT_NO_THROW(with(1, {}));
    EXPECT_NO_THROW(with(4, {"ballast.router_losses=micro_batch"}));
    // The planner is left with one micro-batch.
    const Overrides open = {"train_batch_size=8", "train_micro_batch_size_per_gpu=auto",
                            "gradient_accumulation_steps=auto"};
    const Engine engine = setup::make_engine(with(4, open));
    EXPECT_EQ(engine.blueprint().micro_batches, 1U);
  }
}

}  // namespace
}  // namespace ballast::engine::router_losses_test
