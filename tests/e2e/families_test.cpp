#include <algorithm>
#include <cmath>
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
#include "tests/support/fixtures.h"
#include "tests/support/temp_dir.h"
#include "tests/unit/model/fixture.h"

// Small random models of all families, compared with transformers:
// tests/data/make_family_fixtures.py has the program.

namespace ballast::families_test {
namespace {

using nlohmann::json;

std::filesystem::path fixture(const std::string& name) {
  return test::fixture("families") / name;
}

json read_record(const std::string& family) {
  json record;
  std::ifstream(fixture(family + ".json")) >> record;
  return record;
}

/// Inputs and targets of a batch; `packed`: with the documents of the record.
struct Batch {
  Batch(const json& record, std::size_t step, bool packed = false) {
    for (const std::vector<std::int32_t> sequence : record["tokens"][step]) {
      inputs.insert(inputs.end(), sequence.begin(), sequence.end() - 1);
      targets.insert(targets.end(), sequence.begin() + 1, sequence.end());
      length = sequence.size() - 1;
      ++sequences;
    }
    counted = targets.size();
    if (packed) pack(record["packed"]);
  }
  [[nodiscard]] engine::TokenBatch view() const { return {inputs, targets, positions}; }

  std::vector<std::int32_t> inputs;
  std::vector<std::int32_t> targets;
  std::vector<std::int32_t> positions;
  std::size_t counted = 0;  ///< targets that count
  std::size_t sequences = 0;
  std::size_t length = 0;

 private:
  void pack(const json& record) {
    for (const std::vector<std::int32_t> lengths : record["documents"]) {
      for (const std::int32_t document : lengths) {
        for (std::int32_t i = 0; i < document; ++i) positions.push_back(i);
      }
    }
    for (std::size_t i = 0; i < targets.size(); ++i) {
      if (record["counts"][i / length][i % length] != 0) continue;
      targets[i] = -1;
      --counted;
    }
  }
};

config::Config make_config(const json& record, bool bf16, const std::filesystem::path& out,
                           bool packed = false) {
  const Batch batch(record, 0);
  const json& optimizer = record["optimizer"];
  const json text = {
      {"model", record["model"]},
      {"data", {{packed ? "documents" : "tokens", {"unused"}}, {"sequence_length", batch.length}}},
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

/// The tensor NAME, or PREFIX + NAME, in the order of memory.
std::vector<float> read_tensor(const train::SafetensorsReader& from,
                               const model::TensorSpec& tensor, const std::string& prefix = "") {
  std::vector<float> stored(tensor.size);
  from.read(prefix + tensor.name, stored);
  std::vector<float> found;
  while (found.size() < tensor.size) {
    const model::TensorRun run = model::run_in_files(tensor, found.size());
    const auto first = stored.begin() + static_cast<std::ptrdiff_t>(run.first);
    found.insert(found.end(), first, first + static_cast<std::ptrdiff_t>(run.count));
  }
  return found;
}

std::vector<float> read_logits(const train::SafetensorsReader& from,
                               const std::string& name = "logits") {
  std::vector<float> logits(from.find(name)->elements);
  from.read(name, logits);
  return logits;
}

/// `from` must outlive the result.
engine::WeightSource source_of(const train::SafetensorsReader& from) {
  return {.read = [&from](const model::TensorSpec& tensor, Elems first, std::span<float> out) {
    const std::vector<float> values = read_tensor(from, tensor);
    std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(first), out.size(), out.begin());
  }};
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
            const Batch& batch, bool keeps = false)
      : bench_(config, type, {batch.sequences, batch.length}),
        tokens_(batch.length * batch.sequences),
        counted_(static_cast<double>(batch.counted)) {
    const auto& blocks = bench_.architecture.blocks;
    for (const model::BlockSpec& block : blocks) {
      std::vector<float> flat(block.elements);
      for (const model::TensorSpec& tensor : block.tensors) {
        std::ranges::copy(read_tensor(weights, tensor), flat.begin() + tensor.offset);
      }
      weights_.push_back(bench_.upload(flat));
      gradients_.push_back(bench_.gradient(std::vector<float>(block.elements)));
    }
    run(batch, keeps);
  }

  [[nodiscard]] double loss() const { return bench_.one(loss_) / counted_; }
  /// The load-balancing loss, without its coefficient.
  [[nodiscard]] double balance_loss() const { return bench_.one(router_losses_); }
  [[nodiscard]] std::vector<double> gradient(std::size_t block, const model::TensorSpec& t) const {
    const std::vector<double> all = bench_.values(gradients_[block]);
    std::vector<double> found(all.begin() + t.offset, all.begin() + t.offset + t.size);
    if (block == 0 && t.offset == 0 && bench_.architecture.config.tie_embeddings) {
      const std::vector<double> tied = bench_.values(tied_);
      for (std::size_t i = 0; i < found.size(); ++i) found[i] += tied[i];
    }
    return found;
  }
  /// Logits of all tokens: the final norm and the output matrix in double, from weights of the
  /// training type.
  [[nodiscard]] std::vector<double> logits(const train::SafetensorsReader& weights) const {
    const model::Architecture& model = bench_.architecture;
    const std::size_t width = model.config.hidden_size;
    std::vector<float> gain(width);
    std::vector<float> bias(width);
    std::vector<float> output(model.config.vocab_size * width);
    weights.read(model.outer.norm + ".weight", gain);
    if (model.outer.norm_has_bias) weights.read(model.outer.norm + ".bias", bias);
    weights.read(model.config.tie_embeddings ? model.outer.tokens : model.outer.output, output);
    for (std::vector<float>* values : {&gain, &bias, &output}) {
      for (float& one : *values) one = bench_.type == DType::bf16 ? to_float(to_bf16(one)) : one;
    }
    for (float& one : gain) one += model.outer.norm_offset;
    std::vector<double> found;
    for (std::size_t token = 0; token < tokens_; ++token) {
      const double* const x = last_.data() + token * width;
      double mean = 0.0;
      double squares = 0.0;
      for (std::size_t i = 0; i < width && model.outer.norm_has_bias; ++i) {
        mean += x[i] / static_cast<double>(width);
      }
      for (std::size_t i = 0; i < width; ++i) squares += (x[i] - mean) * (x[i] - mean);
      const double factor =
          1.0 / std::sqrt(squares / static_cast<double>(width) + model.config.norm_epsilon);
      for (std::size_t v = 0; v < model.config.vocab_size; ++v) {
        double sum = 0.0;
        for (std::size_t i = 0; i < width; ++i) {
          sum += ((x[i] - mean) * factor * gain[i] + bias[i]) * output[v * width + i];
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
  /// The half of a layer with experts.
  struct Routed {
    DeviceBytes rows;
    DeviceView<float> sums;
    std::vector<std::int32_t> starts;

    [[nodiscard]] model::ExpertChoices choices(std::size_t expert) const {
      const auto first = static_cast<std::size_t>(starts[expert]);
      return {first, static_cast<std::size_t>(starts[expert + 1]) - first};
    }
  };

  void run(const Batch& batch, bool keeps) {
    auto& b = bench_;
    const auto inputs = b.upload_tokens(batch.inputs);
    const auto targets = b.upload_tokens(batch.targets);
    if (!batch.positions.empty()) positions_ = b.upload_tokens(batch.positions);
    const std::size_t head = b.architecture.blocks.size() - 1;
    kept_.resize(head);
    for (std::size_t i = 1; i < head && keeps; ++i) {
      kept_[i] = b.device->allocate(b.compute->memory().intermediates[i], "intermediates");
    }
    const std::uint64_t totals = b.compute->memory().router_totals;
    if (totals > 0) {
      totals_ = view_as<double>(b.device->allocate(totals * sizeof(double), "totals"));
      router_losses_ = view_as<double>(b.device->allocate(2 * sizeof(double), "losses"));
    }
    inputs_.push_back(b.activation());
    b.compute->embedding_forward(*b.stream, 0, weights_[0], inputs, positions_, inputs_[0]);
    for (std::size_t i = 1; i < head; ++i) forward(i);
    b.stream->synchronize();
    last_ = b.download(inputs_.back());
    flow_ = b.activation();
    loss_ = b.number();
    const bool tied = b.architecture.config.tie_embeddings;
    tied_ = b.gradient(tied ? b.architecture.blocks[0].elements : 1);
    b.compute->zero(*b.stream, tied_);
    b.train_head(weights_[head], tied ? weights_[0] : DeviceBytes{}, inputs_.back(), targets,
                 static_cast<float>(1.0 / counted_), flow_, gradients_[head],
                 tied ? tied_ : DeviceView<float>{}, model::Accumulation::later, loss_);
    inputs_.pop_back();
    for (std::size_t i = head - 1; i >= 1; --i) backward(i);
    b.compute->embedding_backward(*b.stream, 0, inputs, positions_, flow_, gradients_[0]);
    b.stream->synchronize();
  }

  void forward(std::size_t i) {
    auto& b = bench_;
    switch (b.architecture.blocks[i].part) {
      case model::LayerPart::router:
        return route(i);
      case model::LayerPart::shared_expert:
        b.compute->tile_forward(*b.stream, i, weights_[i], positions_, routed_.back().rows,
                                routed_.back().sums, {});
        return;
      case model::LayerPart::expert: {
        const bool last = !b.architecture.is_layer_tile(i + 1);
        const DeviceBytes out = last ? b.activation() : DeviceBytes();
        const Routed& half = routed_.back();
        b.compute->expert_forward(*b.stream, i, weights_[i], half.rows,
                                  half.choices(b.architecture.blocks[i].expert), half.sums, out);
        if (last) inputs_.push_back(out);
        return;
      }
      default:
        inputs_.push_back(b.activation());
        b.compute->layer_forward(*b.stream, i, weights_[i], positions_, inputs_[inputs_.size() - 2],
                                 inputs_.back(), kept_[i]);
    }
  }

  void route(std::size_t i) {
    auto& b = bench_;
    const std::size_t experts = b.compute->memory().experts;
    Routed half = {.rows = b.device->allocate(b.compute->memory().rows, "rows"),
                   .sums = b.gradient(b.activations())};
    const DeviceView<std::int32_t> starts = b.upload_tokens(std::vector<std::int32_t>(experts + 1));
    b.compute->route(*b.stream, i, weights_[i], inputs_.back(), half.rows, half.sums,
                     {.starts = starts, .totals = totals_, .losses = router_losses_});
    half.starts = b.get(starts);
    routed_.push_back(half);
  }

  void backward(std::size_t i) {
    auto& b = bench_;
    const model::LayerPart part = b.architecture.blocks[i].part;
    if (part == model::LayerPart::expert) {
      const Routed& half = routed_.back();
      b.compute->expert_backward(*b.stream, i, weights_[i], half.rows,
                                 half.choices(b.architecture.blocks[i].expert), flow_, half.sums,
                                 gradients_[i]);
      return;
    }
    if (part == model::LayerPart::shared_expert) {
      const Routed& half = routed_.back();
      b.compute->tile_backward(*b.stream, i, weights_[i], positions_, half.rows, flow_, half.sums,
                               gradients_[i], model::Accumulation::later);
      return;
    }
    const DeviceBytes in = inputs_.back();
    inputs_.pop_back();
    if (part == model::LayerPart::router) {
      const Routed& half = routed_.back();
      b.compute->router_backward(*b.stream, i, weights_[i], in, half.rows, half.sums, totals_, 1.0F,
                                 flow_, gradients_[i], model::Accumulation::later);
      routed_.pop_back();
      return;
    }
    b.compute->layer_backward(*b.stream, i, weights_[i], positions_, in, flow_, gradients_[i],
                              model::Accumulation::later, kept_[i]);
  }

  test::Bench bench_;
  std::size_t tokens_;
  double counted_;
  std::vector<DeviceBytes> weights_;
  std::vector<DeviceView<float>> gradients_;
  DeviceView<float> tied_;
  DeviceView<double> loss_;
  std::vector<double> last_;  ///< activations before the head
  DeviceView<const std::int32_t> positions_;
  std::vector<DeviceBytes> inputs_;  ///< of the blocks whose backward pass is to come
  std::vector<Routed> routed_;       ///< likewise
  std::vector<DeviceBytes> kept_;    ///< by block
  DeviceBytes flow_;
  DeviceView<double> totals_;
  DeviceView<double> router_losses_;
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
  if (record.contains("aux_loss")) {
    const double balance = record["aux_loss"][0];
    EXPECT_NEAR(step.balance_loss(), balance, 2e-6 * balance);
  }
  EXPECT_LT(relative_error(step.logits(tensors), read_logits(tensors)), 1e-5);
  for (std::size_t b = 0; b < step.blocks().size(); ++b) {
    for (const model::TensorSpec& tensor : step.blocks()[b].tensors) {
      const std::vector<float> theirs = read_tensor(tensors, tensor, "gradient.");
      EXPECT_LT(relative_error(step.gradient(b, tensor), theirs), 1e-4) << tensor.name;
    }
  }
}

/// What project() of the fixtures' program makes of a gradient in the order of memory.
double project(const std::vector<double>& gradient, const model::TensorSpec& tensor) {
  double sum = 0.0;
  for (Elems at = 0; at < gradient.size();) {
    const model::TensorRun run = model::run_in_files(tensor, at);
    for (Elems i = 0; i < run.count; ++i, ++at) {
      sum += gradient[at] * std::cos(0.7 * static_cast<double>(run.first + i) + 0.3);
    }
  }
  return sum;
}

TEST_P(Families, TwoDocumentsInASequenceAreThoseOfTransformers) {
  const json record = read_record(GetParam());
  const json& packed = record["packed"];
  const train::SafetensorsReader tensors(fixture(std::string(GetParam()) + ".safetensors"));
  const test::TempDir directory;
  const config::Config config = make_config(record, false, directory.path(), true);
  const FirstStep step(config.model, DType::f32, tensors, Batch(record, 0, true));
  const double loss = packed["loss"][0];
  EXPECT_NEAR(step.loss(), loss, 2e-6 * loss);
  EXPECT_LT(relative_error(step.logits(tensors), read_logits(tensors, "packed.logits")), 1e-5);
  for (std::size_t b = 0; b < step.blocks().size(); ++b) {
    for (const model::TensorSpec& tensor : step.blocks()[b].tensors) {
      const std::vector<double> ours = step.gradient(b, tensor);
      const double norm = packed["norm"][tensor.name];
      double squares = 0.0;
      for (const double value : ours) squares += value * value;
      EXPECT_NEAR(std::sqrt(squares), norm, 1e-4 * norm) << tensor.name;
      EXPECT_NEAR(project(ours, tensor), packed["projection"][tensor.name], 3e-4 * norm)
          << tensor.name;
    }
  }
  engine::Engine engine = planning::make_engine(config);
  engine.start(source_of(tensors));
  for (std::size_t i = 0; i < packed["loss"].size(); ++i) {
    const double expected = packed["loss"][i];
    const auto found = engine.train_step(Batch(record, i, true).view(), config.optimizer.lr);
    EXPECT_NEAR(found.loss, expected, 2e-4 * expected) << "step " << i;
  }
}

TEST_P(Families, KeptIntermediatesGiveTheSameBits) {
  const json record = read_record(GetParam());
  const train::SafetensorsReader tensors(fixture(std::string(GetParam()) + ".safetensors"));
  const test::TempDir directory;
  for (const DType type : {DType::f32, DType::bf16}) {
    const model::ModelConfig config = make_config(record, false, directory.path()).model;
    const FirstStep recomputed(config, type, tensors, Batch(record, 0));
    const FirstStep kept(config, type, tensors, Batch(record, 0), true);
    EXPECT_EQ(kept.loss(), recomputed.loss());
    for (std::size_t b = 0; b < kept.blocks().size(); ++b) {
      for (const model::TensorSpec& tensor : kept.blocks()[b].tensors) {
        EXPECT_EQ(kept.gradient(b, tensor), recomputed.gradient(b, tensor)) << tensor.name;
      }
    }
  }
}

/// What transformers itself loses in bf16 bounds what Ballast may lose: each tensor by half more,
/// all together by a tenth.
TEST_P(Families, Bf16IsAsCloseToFp32AsTransformersIs) {
  constexpr double kOfEach = 1.5;
  constexpr double kOfAll = 1.1;
  constexpr double kOneRounding = 0x1p-8;
  constexpr double kOfLoss = 5e-4;
  const json record = read_record(GetParam());
  const json& theirs = record["bf16"];
  const train::SafetensorsReader tensors(fixture(std::string(GetParam()) + ".safetensors"));
  const test::TempDir directory;
  const model::ModelConfig config = make_config(record, true, directory.path()).model;
  const FirstStep step(config, DType::bf16, tensors, Batch(record, 0));
  const double loss = record["loss"][0];
  double largest = 0.0;
  for (const double one : theirs["loss"]) largest = std::max(largest, std::abs(one - loss));
  EXPECT_LE(std::abs(step.loss() - loss), kOfEach * largest + kOfLoss * loss);
  const std::vector<float> logits = read_logits(tensors);
  EXPECT_LE(relative_error(step.logits(tensors), logits),
            kOfEach * theirs["logits_error"].get<double>());
  double our_squares = 0.0;
  double their_squares = 0.0;
  for (std::size_t b = 0; b < step.blocks().size(); ++b) {
    for (const model::TensorSpec& tensor : step.blocks()[b].tensors) {
      const double ours =
          relative_error(step.gradient(b, tensor), read_tensor(tensors, tensor, "gradient."));
      const double bound = theirs["gradient_error"].at(tensor.name);
      EXPECT_LE(ours, kOfEach * bound + kOneRounding) << tensor.name;
      our_squares += ours * ours;
      their_squares += bound * bound;
    }
  }
  EXPECT_LE(std::sqrt(our_squares), kOfAll * std::sqrt(their_squares));
}

TEST_P(Families, TenStepsAreThoseOfTransformers) {
  const json record = read_record(GetParam());
  const train::SafetensorsReader tensors(fixture(std::string(GetParam()) + ".safetensors"));
  for (const bool bf16 : {false, true}) {
    const test::TempDir directory;
    const config::Config config = make_config(record, bf16, directory.path());
    engine::Engine engine = planning::make_engine(config);
    engine.start(source_of(tensors));
    const std::size_t steps = record["loss"].size();
    for (std::size_t i = 0; i < steps; ++i) {
      const Batch batch(record, i);
      const auto found = engine.train_step(batch.view(), config.optimizer.lr);
      const double loss = record["loss"][i];
      EXPECT_NEAR(found.loss, loss, (bf16 ? 2e-2 : 2e-4) * loss) << "step " << i;
      if (record.contains("aux_loss") && !bf16) {
        const double balance = record["aux_loss"][i];
        EXPECT_NEAR(found.balance_loss, balance, 2e-4 * balance) << "step " << i;
      }
    }
    engine.finish();
    if (bf16) continue;
    for (std::size_t b = 0; b < engine.blueprint().model.blocks.size(); ++b) {
      for (const auto& tensor : engine.blueprint().model.blocks[b].tensors) {
        const std::vector<float> ours = engine.read_weights(b, tensor);
        const std::vector<float> theirs = read_tensor(tensors, tensor, "final.");
        EXPECT_LT(relative_error({ours.begin(), ours.end()}, theirs), 1e-3) << tensor.name;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Families,
                         testing::Values("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3",
                                         "olmo2", "gemma3", "gpt_neox", "gpt_neox_sequential",
                                         "mixtral", "mixtral_ties", "mixtral_one", "qwen3_moe",
                                         "qwen3_moe_unnormalised", "qwen2_moe", "olmoe"),
                         [](const auto& family) { return std::string(family.param); });

}  // namespace
}  // namespace ballast::families_test
