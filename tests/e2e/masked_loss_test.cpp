#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/engine/engine.h"
#include "ballast/formats/safetensors.h"
#include "ballast/setup/setup.h"

#include "tests/support/device_kind.h"
#include "tests/support/fixtures.h"
#include "tests/support/function_weights.h"
#include "tests/support/joined_ranks.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"

// Run by all ranks of mpirun. Compares losses and norms with targets that do not count with those
// of transformers' Trainer. tests/data/make_masked_fixture.py makes the fixture.

namespace ballast::masked_loss_test {
namespace {

using nlohmann::json;

std::filesystem::path fixture(const std::string& name) {
  return test::fixture("training") / name;
}

/// The first `count` ids of the file of tokens.
std::vector<std::int32_t> read_tokens(std::size_t count) {
  std::ifstream file(fixture("tokens.u16.bin"), std::ios::binary);
  std::vector<std::int32_t> tokens;
  for (char bytes[2]; tokens.size() < count && file.read(bytes, 2);) {
    tokens.push_back(static_cast<unsigned char>(bytes[0]) | static_cast<unsigned char>(bytes[1])
                                                                << 8);
  }
  return tokens;
}

struct Tokens {
  std::vector<std::int32_t> inputs;
  std::vector<std::int32_t> targets;
};

/// Sequences [first, first + trained.size()). The target of a token is the next one of its sequence
/// if that is trained on.
Tokens sequences_of(const std::vector<std::int32_t>& all, std::size_t first, std::size_t length,
                    const std::vector<std::string>& trained) {
  Tokens found;
  for (std::size_t s = 0; s < trained.size(); ++s) {
    const std::size_t start = (first + s) * length;
    for (std::size_t i = 0; i < length; ++i) {
      found.inputs.push_back(all[start + i]);
      const bool counts = i + 1 < length && trained[s][i + 1] == '1';
      found.targets.push_back(counts ? all[start + i + 1] : -100);
    }
  }
  return found;
}

TEST(MaskedLoss, IsThatOfTransformersTrainer) {
  json reference;
  std::ifstream(fixture("llama_masked.json")) >> reference;
  const json& batch = reference["batch"];
  const json& optimizer = reference["optimizer"];
  const std::uint64_t micro_batches = batch["micro_batches"];
  const std::uint64_t sequences = batch["sequences"];
  comm::Ranks& ranks = test::joined_ranks();
  if (micro_batches % ranks.world() != 0) GTEST_SKIP() << "the micro-batches cannot be shared";
  const std::uint64_t own = micro_batches / ranks.world();
  const test::TempDir directory;
  const config::Config config = test::tiny_config(
      R"("family": "llama", "vocab_size": 131, "hidden_size": 48, "num_layers": 2, "num_heads": 6,
         "num_kv_heads": 2, "intermediate_size": 136, "norm_epsilon": 1e-6,
         "tie_embeddings": false)",
      false, directory.path(),
      {fmt::format("gradient_accumulation_steps={}", own),
       fmt::format("train_micro_batch_size_per_gpu={}", sequences), "zero_optimization.stage=2",
       "zero_optimization.offload_optimizer.device=nvme", "optimizer.params.betas=[0.9, 0.95]",
       "optimizer.params.eps=1e-6", fmt::format("gradient_clipping={}", optimizer["clip"].dump())});
  engine::Engine engine = setup::make_engine(config, nullptr, &ranks);
  const formats::SafetensorsReader initial(fixture("llama.initial.safetensors"));
  test::start_from(engine, {[&](const model::TensorSpec& tensor, Elems first,
                                std::span<float> out) { initial.read(tensor.name, out, first); }});
  const std::uint64_t per_step = micro_batches * sequences;
  const std::uint64_t length = batch["length"];
  const std::vector<std::int32_t> all =
      read_tokens(reference["trained"].size() * per_step * length);
  for (std::size_t step = 0; step < reference["trained"].size(); ++step) {
    const std::vector<std::string> trained = reference["trained"][step];
    const auto mine = trained.begin() + static_cast<std::ptrdiff_t>(ranks.rank() * own * sequences);
    const Tokens tokens = sequences_of(
        all, step * per_step + ranks.rank() * own * sequences, length,
        std::vector<std::string>(mine, mine + static_cast<std::ptrdiff_t>(own * sequences)));
    const auto found = engine.train_step({tokens.inputs, tokens.targets}, optimizer["lr"]);
    const double loss = reference["loss"][step];
    const double norm = reference["grad_norm"][step];
    EXPECT_NEAR(found.loss, loss, 1e-6 * loss) << "step " << step + 1;
    EXPECT_NEAR(found.grad_norm, norm, 1e-5 * norm) << "step " << step + 1;
  }
}

}  // namespace
}  // namespace ballast::masked_loss_test
