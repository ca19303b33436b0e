#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ballast/config/config.h"
#include "ballast/core/random.h"
#include "ballast/cpu_adam/updater.h"
#include "ballast/engine/engine.h"

#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"

// The invariant of the whole engine: where states live, in which order and on how many threads they
// are updated, and how transfers overlap changes not one bit of what is learnt.

namespace ballast::engine {
namespace {

constexpr std::uint64_t kSteps = 30;
constexpr std::uint64_t kVocab = 131;

struct Model {
  std::string name;
  std::string section;
};

const Model kGpt2 = {"gpt2",
                     R"("family": "gpt2", "vocab_size": 131, "hidden_size": 64, "num_layers": 2,
                        "num_heads": 4)"};
const Model kLlama = {"llama",
                      R"("family": "llama", "vocab_size": 131, "hidden_size": 96, "num_layers": 3,
                         "num_heads": 6, "num_kv_heads": 2, "intermediate_size": 160)"};
const Model kTiedLlama = {"tied llama", kLlama.section + R"(, "tie_embeddings": true)"};

/// What a run produced, bit for bit.
struct Outcome {
  std::vector<double> losses;
  std::vector<double> norms;
  std::uint64_t states = 0;
  bool operator==(const Outcome&) const = default;
};

std::vector<std::int32_t> random_ids(std::size_t count, std::uint64_t stream) {
  std::vector<std::int32_t> ids(count);
  for (std::size_t i = 0; i < count; ++i) {
    // Skewed, so that there is something to learn.
    const auto word = random_u64(7, i, stream);
    ids[i] = static_cast<std::int32_t>((word % kVocab) * ((word >> 32) % kVocab) / kVocab);
  }
  return ids;
}

Outcome train(const Model& model, bool bf16, const std::vector<std::string>& overrides) {
  const test::TempDir directory;
  Engine engine(test::tiny_config(model.section, bf16, directory.path(), overrides), nullptr);
  engine.start();
  Outcome outcome;
  const std::size_t count = engine.blueprint().tokens_per_step();
  const std::size_t evaluation =
      engine.evaluation_micro_batches() * engine.blueprint().shape.tokens();
  for (std::uint64_t step = 1; step <= kSteps; ++step) {
    const double rate = 0.003 * static_cast<double>(std::min<std::uint64_t>(step, 5)) / 5.0;
    const StepResult result =
        engine.train_step(random_ids(count, 2 * step), random_ids(count, 2 * step + 1), rate);
    EXPECT_FALSE(result.skipped);
    outcome.losses.push_back(result.loss);
    outcome.norms.push_back(result.grad_norm);
    if (step % 10 == 0) {
      outcome.losses.push_back(
          engine.evaluate(random_ids(evaluation, 1000), random_ids(evaluation, 1001)));
    }
  }
  outcome.states = engine.state_hash();
  return outcome;
}

struct Variant {
  std::string name;
  std::vector<std::string> overrides;
};

std::vector<Variant> variants() {
  const std::string optimizer = "zero_optimization.offload_optimizer.device=";
  const std::string weights = "zero_optimization.offload_param.device=";
  std::vector<Variant> list = {
      {"all on device, serial", {"ballast.serial=true"}},
      {"weights on host", {weights + "cpu"}},
      {"optimizer on host", {optimizer + "cpu"}},
      {"weights and optimizer on host", {weights + "cpu", optimizer + "cpu"}},
      {"optimizer on NVMe", {optimizer + "nvme"}},
      {"weights and optimizer on NVMe", {weights + "nvme", optimizer + "nvme"}},
      {"weights and optimizer on NVMe, serial",
       {weights + "nvme", optimizer + "nvme", "ballast.serial=true"}},
      {"weights on NVMe, optimizer on device", {weights + "nvme"}},
      {"optimizer on NVMe by threads", {optimizer + "nvme", "aio.backend=threads"}},
      {"one staging buffer",
       {weights + "nvme", optimizer + "nvme",
        "zero_optimization.offload_optimizer.buffer_count=1"}},
      {"automatic", {weights + "auto", optimizer + "auto"}},
      {"mixed",
       {weights + "cpu",
        R"(ballast.placement=[{"blocks": "0-1", "weights": "nvme", "optimizer": "device"},
                              {"blocks": 2, "weights": "device", "optimizer": "nvme"}])"}},
      {"activations on host", {"ballast.activations_on_host=true"}},
      {"activations on host, everything else on NVMe",
       {weights + "nvme", optimizer + "nvme", "activation_checkpointing.cpu_checkpointing=true"}},
      {"micro-batch-major", {"ballast.order=micro_batch_major"}},
      {"micro-batch-major, weights and optimizer on NVMe, activations on host",
       {"ballast.order=micro_batch_major", weights + "nvme", optimizer + "nvme",
        "ballast.activations_on_host=true"}},
      {"1 update thread", {optimizer + "cpu", "ballast.update_threads=1"}},
      {"3 update threads", {optimizer + "cpu", "ballast.update_threads=3"}},
      {"throttled link", {weights + "cpu", optimizer + "cpu", "ballast.link_gbps=2"}},
  };
  for (const Isa isa : cpu_adam::available()) {
    list.push_back({fmt::format("update by {}", to_string(isa)),
                    {optimizer + "nvme", fmt::format("ballast.update_isa={}", to_string(isa))}});
  }
  return list;
}

void expect_invariance(const Model& model, bool bf16) {
  const Outcome expected = train(model, bf16, {});
  EXPECT_LT(expected.losses.back(), expected.losses.front()) << "nothing was learnt";
  for (const Variant& variant : variants()) {
    const Outcome outcome = train(model, bf16, variant.overrides);
    EXPECT_EQ(outcome.losses, expected.losses) << model.name << ", " << variant.name;
    EXPECT_EQ(outcome.norms, expected.norms) << model.name << ", " << variant.name;
    EXPECT_EQ(outcome.states, expected.states) << model.name << ", " << variant.name;
  }
}

TEST(Invariance, Gpt2InBf16) {
  expect_invariance(kGpt2, true);
}
TEST(Invariance, Gpt2InFp32) {
  expect_invariance(kGpt2, false);
}
TEST(Invariance, LlamaInBf16) {
  expect_invariance(kLlama, true);
}
TEST(Invariance, LlamaInFp32) {
  expect_invariance(kLlama, false);
}
TEST(Invariance, TiedLlamaInBf16) {
  expect_invariance(kTiedLlama, true);
}

TEST(Invariance, AnotherSeedGivesAnotherResult) {
  const Outcome one = train(kGpt2, true, {});
  const Outcome other = train(kGpt2, true, {"ballast.seed=99"});
  EXPECT_NE(one.states, other.states);
  EXPECT_NE(one.losses, other.losses);
}

}  // namespace
}  // namespace ballast::engine
