#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/config/config.h"
#include "ballast/engine/engine.h"
#include "ballast/model/compute.h"
#include "ballast/planning/engine_inputs.h"
#include "ballast/train/safetensors.h"

#include "tests/support/device_kind.h"
#include "tests/support/temp_dir.h"
#include "tests/unit/model/fixture.h"

// Small random models of all families, compared with transformers:
// tests/data/make_family_fixtures.py has the program.

namespace ballast {
namespace {

using nlohmann::json;

std::filesystem::path fixture(const std::string& name) {
  const char* data = std::getenv("BALLAST_TEST_DATA");
  return std::filesystem::absolute(data != nullptr ? data : "tests/data") / "families" / name;
}

json read_record(const std::string& family) {
  json record;
  std::ifstream(fixture(family + ".json")) >> record;
  return record;
}

/// Inputs and targets of a batch.
struct Batch {
  Batch(const json& record, std::size_t step) {
    for (const std::vector<std::int32_t> sequence : record["tokens"][step]) {
      inputs.insert(inputs.end(), sequence.begin(), sequence.end() - 1);
      targets.insert(targets.end(), sequence.begin() + 1, sequence.end());
      length = sequence.size() - 1;
      ++sequences;
    }
  }
  std::vector<std::int32_t> inputs;
  std::vector<std::int32_t> targets;
  std::size_t sequences = 0;
  std::size_t length = 0;
};

config::Config make_config(const json& record, bool bf16, const std::filesystem::path& out) {
  const Batch batch(record, 0);
  const json& optimizer = record["optimizer"];
  const json text = {
      {"model", record["model"]},
      {"data", {{"tokens", {"unused.bin"}}, {"sequence_length", batch.length}}},
      {"optimizer", {{"type", "AdamW"}, {"params", optimizer}}},
      {"bf16", {{"enabled", bf16}}},
      {"gradient_clipping", 0},
      {"train_micro_batch_size_per_gpu", batch.sequences},
      {"zero_optimization",
       {{"offload_optimizer", {{"device", "cpu"}}}, {"offload_param", {{"device", "cpu"}}}}},
      {"ballast",
       {{"device", test::device_kind()},
        {"device_bytes", "128MiB"},
        {"host_bytes", "64MiB"},
        {"out", out.string()}}}};
  return config::parse(text.dump(), out, "families", {});
}

/// |ours - theirs| / |theirs|, L2.
double relative_error(const std::vector<double>& ours, const std::vector<float>& theirs) {
  double error = 0.0;
  double size = 0.0;
  for (std::size_t i = 0; i < theirs.size(); ++i) {
    error += (ours[i] - theirs[i]) * (ours[i] - theirs[i]);
    size += static_cast<double>(theirs[i]) * theirs[i];
  }
  return size == 0.0 ? std::sqrt(error) : std::sqrt(error / size);
}

/// Forward and backward pass of the first batch, block by block.
class FirstStep {
 public:
  FirstStep(const model::ModelConfig& config, DType type, const train::SafetensorsReader& weights,
            const Batch& batch)
      : bench_(config, type, {batch.sequences, batch.length}),
        tokens_(batch.length * batch.sequences) {
    const auto& blocks = bench_.architecture.blocks;
    for (const model::BlockSpec& block : blocks) {
      std::vector<float> flat(block.elements);
      for (const model::TensorSpec& tensor : block.tensors) {
        weights.read(tensor.name, std::span(flat).subspan(tensor.offset, tensor.size));
      }
      weights_.push_back(bench_.upload(flat));
      gradients_.push_back(bench_.gradient(std::vector<float>(block.elements)));
    }
    run(batch);
  }

  [[nodiscard]] double loss() const { return bench_.one(loss_) / static_cast<double>(tokens_); }
  [[nodiscard]] std::vector<double> gradient(std::size_t block, const model::TensorSpec& t) const {
    const std::vector<double> all = bench_.values(gradients_[block]);
    std::vector<double> found(all.begin() + t.offset, all.begin() + t.offset + t.size);
    if (block == 0 && t.offset == 0 && bench_.architecture.config.tie_embeddings) {
      const std::vector<double> tied = bench_.values(tied_);
      for (std::size_t i = 0; i < found.size(); ++i) found[i] += tied[i];
    }
    return found;
  }
  /// Logits of all tokens: the final RMSNorm and the output matrix in double.
  [[nodiscard]] std::vector<double> logits(const train::SafetensorsReader& weights) const {
    const model::Architecture& model = bench_.architecture;
    const std::size_t width = model.config.hidden_size;
    std::vector<float> gain(width);
    std::vector<float> output(model.config.vocab_size * width);
    weights.read(model.outer.norm + ".weight", gain);
    weights.read(model.config.tie_embeddings ? model.outer.tokens : model.outer.output, output);
    std::vector<double> found;
    for (std::size_t token = 0; token < tokens_; ++token) {
      const double* const x = last_.data() + token * width;
      double squares = 0.0;
      for (std::size_t i = 0; i < width; ++i) squares += x[i] * x[i];
      const double factor =
          1.0 / std::sqrt(squares / static_cast<double>(width) + model.config.norm_epsilon);
      for (std::size_t v = 0; v < model.config.vocab_size; ++v) {
        double sum = 0.0;
        for (std::size_t i = 0; i < width; ++i) {
          sum += x[i] * factor * gain[i] * output[v * width + i];
        }
        found.push_back(sum);
      }
    }
    return found;
  }
  [[nodiscard]] const std::vector<model::BlockSpec>& blocks() const {
    return bench_.architecture.blocks;
  }

 private:
  void run(const Batch& batch) {
    auto& b = bench_;
    const std::size_t layers = b.architecture.config.num_layers;
    const auto inputs = b.upload_tokens(batch.inputs);
    const auto targets = b.upload_tokens(batch.targets);
    std::vector<DeviceBytes> activations(layers + 1);
    for (DeviceBytes& one : activations) one = b.activation();
    b.compute->embedding_forward(*b.stream, weights_[0], inputs, {}, activations[0]);
    for (std::size_t i = 1; i <= layers; ++i) {
      b.compute->layer_forward(*b.stream, i, weights_[i], {}, activations[i - 1], activations[i],
                               {});
    }
    b.stream->synchronize();
    last_ = b.download(activations[layers]);
    const DeviceBytes dx = b.activation();
    loss_ = b.number();
    const bool tied = b.architecture.config.tie_embeddings;
    tied_ = b.gradient(tied ? b.architecture.blocks[0].elements : 1);
    b.compute->zero(*b.stream, tied_);
    b.compute->head_train(*b.stream, weights_[layers + 1], tied ? weights_[0] : DeviceBytes{},
                          activations[layers], targets, 1.0F / static_cast<float>(tokens_), dx,
                          gradients_[layers + 1], tied ? tied_ : DeviceView<float>{},
                          model::Accumulation::later, loss_);
    for (std::size_t i = layers; i >= 1; --i) {
      b.compute->layer_backward(*b.stream, i, weights_[i], {}, activations[i - 1], dx,
                                gradients_[i], model::Accumulation::later, {});
    }
    b.compute->embedding_backward(*b.stream, inputs, {}, dx, gradients_[0]);
    b.stream->synchronize();
  }

  test::Bench bench_;
  std::size_t tokens_;
  std::vector<DeviceBytes> weights_;
  std::vector<DeviceView<float>> gradients_;
  DeviceView<float> tied_;
  DeviceView<double> loss_;
  std::vector<double> last_;  ///< activations before the head
};

class Families : public testing::TestWithParam<const char*> {};

TEST_P(Families, LogitsLossAndGradientsAreThoseOfTransformers) {
  const json record = read_record(GetParam());
  const train::SafetensorsReader tensors(fixture(std::string(GetParam()) + ".safetensors"));
  const test::TempDir directory;
  const model::ModelConfig config = make_config(record, false, directory.path()).model;
  const FirstStep step(config, DType::f32, tensors, Batch(record, 0));
  const double loss = record["loss"][0];
  EXPECT_NEAR(step.loss(), loss, 2e-6 * loss);
  std::vector<float> logits(record["tokens"][0].size() * (record["tokens"][0][0].size() - 1) *
                            config.vocab_size);
  tensors.read("logits", logits);
  EXPECT_LT(relative_error(step.logits(tensors), logits), 1e-5);
  for (std::size_t b = 0; b < step.blocks().size(); ++b) {
    for (const model::TensorSpec& tensor : step.blocks()[b].tensors) {
      std::vector<float> theirs(tensor.size);
      tensors.read("gradient." + tensor.name, theirs);
      EXPECT_LT(relative_error(step.gradient(b, tensor), theirs), 1e-4) << tensor.name;
    }
  }
}

TEST_P(Families, TenStepsAreThoseOfTransformers) {
  const json record = read_record(GetParam());
  const train::SafetensorsReader tensors(fixture(std::string(GetParam()) + ".safetensors"));
  for (const bool bf16 : {false, true}) {
    const test::TempDir directory;
    const config::Config config = make_config(record, bf16, directory.path());
    engine::Engine engine = planning::make_engine(config);
    engine.start([&](const model::TensorSpec& tensor, Elems first, std::span<float> out) {
      tensors.read(tensor.name, out, first);
    });
    const std::size_t steps = record["loss"].size();
    for (std::size_t i = 0; i < steps; ++i) {
      const Batch batch(record, i);
      const auto found = engine.train_step({batch.inputs, batch.targets}, config.optimizer.lr);
      const double loss = record["loss"][i];
      EXPECT_NEAR(found.loss, loss, (bf16 ? 2e-2 : 2e-4) * loss) << "step " << i;
    }
    engine.finish();
    if (bf16) continue;
    for (std::size_t b = 0; b < engine.blueprint().model.blocks.size(); ++b) {
      for (const auto& tensor : engine.blueprint().model.blocks[b].tensors) {
        const std::vector<float> ours = engine.read_weights(b, tensor);
        std::vector<float> theirs(tensor.size);
        tensors.read("final." + tensor.name, theirs);
        EXPECT_LT(relative_error({ours.begin(), ours.end()}, theirs), 1e-3) << tensor.name;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Families,
                         testing::Values("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3",
                                         "olmo2"),
                         [](const auto& family) { return std::string(family.param); });

}  // namespace
}  // namespace ballast
