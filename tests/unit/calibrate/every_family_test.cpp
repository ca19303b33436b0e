#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/calibrate/kernel_comparison.h"
#include "ballast/core/error.h"
#include "ballast/model/family.h"
#include "ballast/setup/translate.h"

#include "src/calibrate/calibration.h"
#include "src/calibrate/timed_passes.h"
#include "tests/support/fixtures.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"

// The calibration and the kernel comparison run passes outside of a run. They must know every
// argument that a model's passes have.

namespace ballast::calibrate::every_family_test {
namespace {

using model::CostCurve;
using model::Kernel;
using nlohmann::json;

/// Changes of a run that change the passes of its layers or their arguments.
struct Choice {
  std::string name;
  std::vector<std::string> overrides;
};

const std::vector<Choice>& choices() {
  static const std::string adapters = R"(ballast.adapters={"rank": 2, "targets": )";
  static const std::string train = "ballast.train=adapters";
  static const std::vector<Choice> all = {
      {"as it is", {}},
      {"packed", {test::kPacked}},
      {"adapters", {train, adapters + R"("all-linear", "dropout": 0.1})"}},
      {"DoRA", {train, adapters + R"("all-linear", "dora": true})"}},
      {"int8", {train, adapters + R"("all-linear"})", "ballast.quantized_base=int8"}},
      {"nf4",
       {train, adapters + R"("all-linear"})", "ballast.quantized_base=nf4",
        "ballast.double_quantization=true"}},
      {"pairs",
       {train, adapters + R"("all-linear"})", "ballast.eval_batches=1",
        R"(data={"pairs": "unused.pt", "sequence_length": 37})"}},
      {"norms", {R"(ballast.train=["*norm*"])"}},
      {"last layer", {R"(ballast.train=["*.1.*"])"}},
      {"first layer", {R"(ballast.train=["*.0.*"])"}},
      {"embedding", {R"(ballast.train=["*embed_tokens.weight"])"}},
      {"head", {R"(ballast.train=["lm_head.weight"])"}},
      {"vocabulary in tiles", {"model.vocabulary_tiles=2"}},
      {"layers in tiles", {"model.layer_tiles=2", "model.vocabulary_tiles=2"}},
      {"layers in three tiles", {"model.use_parallel_residual=false", "model.layer_tiles=3"}},
      {"tied", {"model.tie_embeddings=true"}},
      {"not tied", {"model.tie_embeddings=false"}}};
  return all;
}

class EveryFamily : public testing::Test {
 protected:
  static std::vector<std::pair<std::string, json>> models() {
    std::vector<std::pair<std::string, json>> found = {{"gpt2",
                                                        {{"family", "gpt2"},
                                                         {"vocab_size", 61},
                                                         {"hidden_size", 32},
                                                         {"num_layers", 2},
                                                         {"num_heads", 2}}}};
    for (const auto& file : std::filesystem::directory_iterator(test::fixture("families"))) {
      if (file.path().extension() != ".json") continue;
      json record;
      std::ifstream(file.path()) >> record;
      if (record.contains("model")) found.emplace_back(file.path().stem(), record["model"]);
    }
    std::sort(found.begin(), found.end());
    return found;
  }

  /// Returns nothing if the rules of the family forbid the choice.
  std::optional<config::Config> config_of(json model, const Choice& choice, bool bf16) const {
    model["max_sequence"] = std::max<std::uint64_t>(model.value("max_sequence", 0), 64);
    std::string section = model.dump();
    section = section.substr(1, section.size() - 2);
    try {
      std::vector<std::string> overrides = {"ballast.compute_threads=1"};
      overrides.insert(overrides.end(), choice.overrides.begin(), choice.overrides.end());
      return test::tiny_config(section, bf16, directory_.path(), overrides);
    } catch (const Error& error) {
      EXPECT_EQ(error.category(), ErrorCategory::config);
      return std::nullopt;
    }
  }

  test::TempDir directory_;
};

/// Returns the passes of `kernel` in a step of the sample.
double count_passes(const Sample& sample, Kernel kernel) {
  const model::MicroBatchShape shape = {1, sample.length};
  const auto program = model::write_program(
      sample.computed, sample.blueprint.type, {.micro_batch = shape},
      model::kernel_memory(sample.computed, sample.blueprint.type, shape, "host", 1));
  double count = 0.0;
  for (const model::PassId id : training_passes(program)) {
    count += program.passes[id].kernel == kernel ? 1.0 : 0.0;
  }
  return count;
}

/// The passes of each class of attention are those of all layers, and their parts are measurable.
void check_parts(const Sample& sample, TimedPasses& passes) {
  double sum = 0.0;
  double flops = 0.0;
  for (const AttentionClassInfo& info : kAttentionClasses) {
    const TimedPasses::Work work = passes.work(CostCurve::forward, info.id);
    EXPECT_LE(work.attention_flops, work.flops);
    sum += work.passes;
    flops += work.passes * work.attention_flops;
  }
  const TimedPasses::Work all = passes.work(CostCurve::forward);
  EXPECT_EQ(sum, all.passes);
  EXPECT_NEAR(flops, all.passes * all.attention_flops, 1e-9 * flops);
  EXPECT_EQ(all.adapter_traffic > 0.0, sample.computed.adapters.has_value());
  // Measuring takes time, so models with the usual parts alone are left out.
  const bool recurs = passes.work(CostCurve::forward, AttentionClass::recurrence).passes > 0.0;
  if (!recurs && !sample.computed.adapters) return;
  PartRates rates;
  ASSERT_NO_THROW(rates = measure_parts(sample, 1));
  for (const AttentionClassInfo& info : kAttentionClasses) {
    const plan::AttentionRate& rate = rates.attention[static_cast<std::size_t>(info.id)];
    EXPECT_GE(rate.forward, 0.0);
    EXPECT_GE(rate.backward, 0.0);
    const bool has = passes.work(CostCurve::forward, info.id).passes > 0.0;
    EXPECT_TRUE(has || rate.forward == 0.0);
  }
}

/// Runs the passes that the calibration measures.
void run_timed(const config::Config& config) {
  const engine::RunInputs run = setup::translate(config);
  const Sample sample = make_sample(run);
  TimedPasses passes(sample, {1, sample.length});
  ASSERT_NO_THROW(passes.run_each());
  for (int i = 0; i < 3; ++i) ASSERT_NO_THROW(passes.layer_pass());
  EXPECT_GT(passes.work(CostCurve::forward).flops, 0.0);
  EXPECT_GT(passes.work(CostCurve::head).flops, 0.0);
  for (const auto& [curve, kernel] : {std::pair{CostCurve::forward, Kernel::layer},
                                      std::pair{CostCurve::backward, Kernel::layer_backward},
                                      std::pair{CostCurve::head, Kernel::head_train}}) {
    EXPECT_EQ(passes.work(curve).passes, count_passes(sample, kernel));
  }
  check_parts(sample, passes);
}

/// Runs the passes that the comparison of kernels runs.
void run_compared(const config::Config& config) {
  StepPasses passes(few_layers(setup::translate(config)), config.type, {1, 37},
                    config.has_positions(),
                    {.kind = "host", .type = config.type, .compute_threads = 1}, {});
  for (const model::PassId pass : passes.order()) {
    SCOPED_TRACE(passes.name_of(pass));
    ASSERT_NO_THROW(passes.run(pass));
  }
}

/// Every model is tried as it is. In CI each other choice is tried with two models that allow it,
/// otherwise (BALLAST_TEST_CALIBRATION=all) with all of them.
TEST_F(EveryFamily, HasAllArgumentsOfItsPasses) {
  const std::size_t most = std::getenv("BALLAST_TEST_CALIBRATION") == nullptr ? 2 : 1000;
  const auto all = models();
  std::set<std::string> families;
  for (std::size_t c = 0; c < choices().size(); ++c) {
    const Choice& choice = choices()[c];
    std::size_t tried = 0;
    for (std::size_t m = 0; m < all.size() && (c == 0 || tried < most); ++m) {
      const auto& [name, model] = all[(m + 7 * c) % all.size()];
      const std::optional<config::Config> config = config_of(model, choice, (m + c) % 2 == 1);
      if (!config) continue;
      SCOPED_TRACE(name + ", " + choice.name);
      run_timed(*config);
      run_compared(*config);
      ++tried;
      if (c == 0) families.insert(config->model.family);
    }
    EXPECT_GE(tried, 2U) << choice.name;
  }
  EXPECT_EQ(families.size(), model::family_names().size());
}

}  // namespace
}  // namespace ballast::calibrate::every_family_test
