// Whole blocks, compared with a plain model in double.
#include <limits>
#include <string>
#include <tuple>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/model/family.h"
#include "ballast/text/json.h"

#include "tests/support/documents.h"
#include "tests/support/tags.h"
#include "tests/unit/model/fixture.h"
#include "tests/unit/model/reference.h"

namespace ballast::model::block_test {
namespace {

using test::Bench;
using test::central_difference;
using test::dot;
using test::normals;
using test::Reference;
using test::relative_error;
using Values = std::vector<double>;

struct Case {
  const char* name;
  ModelConfig config;
  MicroBatchShape shape;
  int threads;
  bool packed = false;  ///< documents in the sequences, targets that do not count
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.name;
}

/// Heads whose total width is larger or smaller than hidden_size.
ModelConfig with_head_dim(ModelConfig config, std::uint64_t head_dim) {
  config.head_dim = head_dim;
  return config;
}

/// Llama whose rotary positions depend on documents: those of more than 7 tokens are long.
ModelConfig with_scaling(const std::string& keys) {
  ModelConfig config = with_head_dim(default_config("llama"), 8);
  const ModelConfig small = test::small_llama();
  config.vocab_size = small.vocab_size;
  config.hidden_size = small.hidden_size;
  config.num_layers = small.num_layers;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.intermediate_size = small.intermediate_size;
  config.details["rope_scaling"] = text::parse_json(
      fmt::format(R"({{"original_max_position_embeddings": 7, "factor": 3, {}}})", keys), "test");
  return config;
}
const char* const kDynamic = R"("rope_type": "dynamic")";
const char* const kLongRope = R"("rope_type": "longrope", "attention_factor": 1,
    "short_factor": [1, 1.1, 1.2, 1.4], "long_factor": [1.1, 2, 5, 9])";

/// 70 and 131 positions: more than one tile of query rows, the last one not full.
std::vector<Case> cases() {
  return {{"gpt2", test::small_gpt2(), {2, 70}, 2},
          {"gpt2_one_thread", test::small_gpt2(), {3, 1}, 1},
          {"gpt2_three_threads", test::small_gpt2(), {1, 7}, 3},
          {"llama", test::small_llama(), {2, 70}, 2},
          {"llama_three_threads", test::small_llama(), {1, 131}, 3},
          {"llama_one_thread", test::small_llama(), {2, 5}, 1},
          {"gpt2_wide_heads", with_head_dim(test::small_gpt2(), test::odd(22, 40)), {2, 9}, 2},
          {"llama_wide_heads", with_head_dim(test::small_llama(), 16), {2, 9}, 2},
          {"gpt2_narrow_heads", with_head_dim(test::small_gpt2(), test::odd(5, 8)), {1, 9}, 2},
          {"gpt2_packed", test::small_gpt2(), {2, 70}, 2, true},
          {"llama_packed", test::small_llama(), {3, 131}, 2, true},
          {"llama_dynamic", with_scaling(kDynamic), {2, 9}, 2},
          {"llama_dynamic_short", with_scaling(kDynamic), {2, 7}, 2},
          {"llama_dynamic_packed", with_scaling(kDynamic), {2, 40}, 3, true},
          {"llama_longrope", with_scaling(kLongRope), {1, 9}, 1},
          {"llama_longrope_packed", with_scaling(kLongRope), {2, 40}, 2, true}};
}

/// Checks `gradient` of the tensor at [begin, begin + size) of `x` against the derivative of `loss`
/// along one random direction over all elements, and along a few single elements.
void expect_derivatives(const std::function<double()>& loss, Values& x, const Values& gradient,
                        std::size_t begin, std::size_t size, const std::string& what) {
  double norm = 0.0;
  for (std::size_t i = 0; i < size; ++i) norm += gradient[begin + i] * gradient[begin + i];
  norm = std::sqrt(norm);
  ASSERT_GT(norm, 0.0) << what;
  const Values direction = normals(size, 77);
  const Values before = x;
  double step = 0.0;
  const std::function<double()> along = [&] {
    for (std::size_t i = 0; i < size; ++i) x[begin + i] = before[begin + i] + step * direction[i];
    return loss();
  };
  const double expected = central_difference(along, step);
  x = before;
  double actual = 0.0;
  for (std::size_t i = 0; i < size; ++i) actual += gradient[begin + i] * direction[i];
  EXPECT_NEAR(actual, expected, 2e-5 * norm) << what << " along a direction";
  for (std::size_t sample = 0; sample < 4; ++sample) {
    const std::size_t i = begin + random_u64(5, sample) % size;
    EXPECT_NEAR(gradient[i], central_difference(loss, x[i]), 2e-5 * norm) << what << " at " << i;
  }
}

class Blocks : public testing::TestWithParam<Case> {
 protected:
  Bench bench{GetParam().config, DType::f32, GetParam().shape, GetParam().threads};
  Reference reference{bench.architecture.config, GetParam().shape.sequences,
                      GetParam().shape.length};
  DeviceView<const std::int32_t> positions;  ///< empty unless packed

  void SetUp() override {
    if (!GetParam().packed) return;
    reference.positions =
        test::packed_positions(GetParam().shape.sequences, GetParam().shape.length);
    positions = bench.upload_tokens(reference.positions);
  }
};

TEST_P(Blocks, LayerForwardEqualsThePlainModel) {
  const BlockSpec& block = bench.architecture.blocks[2];
  const Values weights = bench.weights(2);
  const Values in = bench.activation_values(9);
  const DeviceBytes out = bench.activation();
  bench.kernels().layer_forward(*bench.stream, 2, bench.upload(weights), positions,
                                bench.upload(in), out, {});
  bench.stream->synchronize();
  EXPECT_LT(relative_error(bench.download(out), reference.layer(block, weights, in)), 2e-6);
}

TEST_P(Blocks, LayerBackwardGivesTheDerivativesAndAddsToTheGradient) {
  const BlockSpec& block = bench.architecture.blocks[2];
  Values weights = bench.weights(2);
  Values in = bench.activation_values(9);
  const Values dy = bench.activation_values(10);
  const DeviceBytes d = bench.upload(dy);
  const auto flat = bench.gradient(std::vector<float>(block.elements, 3.0F));
  bench.kernels().layer_backward(*bench.stream, 2, bench.upload(weights), positions,
                                 bench.upload(in), d, flat, Accumulation::later, {});
  bench.stream->synchronize();
  Values gradient = bench.values(flat);
  for (double& value : gradient) value -= 3.0;
  const Values dx = bench.download(d);
  const auto loss = [&] { return dot(reference.layer(block, weights, in), dy); };
  Elems covered = 0;
  for (const TensorSpec& tensor : block.tensors) {
    expect_derivatives(loss, weights, gradient, tensor.offset, tensor.size, tensor.name);
    covered += tensor.size;
  }
  expect_derivatives(loss, in, dx, 0, in.size(), "input");
  // The gaps between the tensors are unchanged.
  EXPECT_LE(static_cast<Elems>(std::count_if(gradient.begin(), gradient.end(),
                                             [](double value) { return value != 0.0; })),
            covered);
}

TEST_P(Blocks, HeadGivesTheLossAndItsScaledDerivatives) {
  for (const bool tied : {false, true}) {
    Case with = GetParam();
    with.config.tie_embeddings = tied;
    Bench b(with.config, DType::f32, with.shape, with.threads);
    Reference plain{b.architecture.config, with.shape.sequences, with.shape.length};
    const std::size_t last = b.architecture.blocks.size() - 1;
    const BlockSpec& block = b.architecture.blocks[last];
    const std::size_t matrix = with.config.vocab_size * with.config.hidden_size;
    Values weights = b.weights(last);
    Values embedding = b.weights(0);
    Values in = b.activation_values(9);
    auto targets = b.tokens(3);
    for (std::size_t i = 0; with.packed && i < targets.size(); i += 3) targets[i] = -1;
    double* const output =
        tied ? embedding.data() : &weights[block.tensor("lm_head.weight").offset];
    const float scale = 0.125F;
    const auto loss = [&] { return scale * plain.head(weights, output, in, targets); };

    const DeviceBytes w = b.upload(weights);
    const DeviceBytes e = tied ? b.upload(embedding) : DeviceBytes();
    const DeviceBytes x = b.upload(in);
    const DeviceBytes dx = b.activation();
    const auto t = b.upload_tokens(targets);
    const auto gradient = b.gradient(std::vector<float>(block.elements, 3.0F));
    const auto tied_gradient =
        tied ? b.gradient(std::vector<float>(matrix, 3.0F)) : DeviceView<float>();
    const auto trained = b.number();
    const auto evaluated = b.number();
    b.train_head(w, e, x, t, scale, dx, gradient, tied_gradient, Accumulation::later, trained);
    b.kernels().head_forward(*b.stream, w, tied ? e : w, x, t, evaluated);
    b.stream->synchronize();

    EXPECT_NEAR(b.one(trained) * scale, loss(), 2e-6 * std::abs(loss()));
    EXPECT_EQ(b.one(trained), b.one(evaluated));
    const auto added = [&](DeviceView<float> view) {
      Values values = b.values(view);
      for (double& value : values) value -= 3.0;
      return values;
    };
    for (const TensorSpec& tensor : block.tensors) {
      expect_derivatives(loss, weights, added(gradient), tensor.offset, tensor.size, tensor.name);
    }
    if (tied) expect_derivatives(loss, embedding, added(tied_gradient), 0, matrix, "embedding");
    expect_derivatives(loss, in, b.download(dx), 0, in.size(), "input");
  }
}

TEST_P(Blocks, EmbeddingForwardLooksUpAndBackwardAddsInTokenOrder) {
  const BlockSpec& block = bench.architecture.blocks[0];
  const Values weights = bench.weights(0);
  const auto tokens = bench.tokens(3);
  const auto t = bench.upload_tokens(tokens);
  const DeviceBytes out = bench.activation();
  const Values dy = bench.activation_values(4);
  const auto gradient = bench.gradient(block.elements);
  bench.kernels().embedding_forward(*bench.stream, 0, bench.upload(weights), t, positions, out);
  bench.kernels().embedding_backward(*bench.stream, 0, t, t, positions, bench.upload(dy), gradient);
  bench.stream->synchronize();

  EXPECT_LT(relative_error(bench.download(out), reference.embedding(block, weights, tokens)), 1e-7);
  const std::size_t width = bench.architecture.config.hidden_size;
  std::vector<float> expected(block.elements, 0.0F);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    for (std::size_t c = 0; c < width; ++c) {
      const auto d = static_cast<float>(dy[i * width + c]);
      expected[static_cast<std::size_t>(tokens[i]) * width + c] += d;
      if (block.tensors.size() == 1) continue;
      expected[block.tensors[1].offset + reference.position(i) * width + c] += d;
    }
  }
  EXPECT_EQ(bench.get(gradient), expected);
}

INSTANTIATE_TEST_SUITE_P(Shapes, Blocks, testing::ValuesIn(cases()),
                         [](const auto& info) { return std::string(info.param.name); });

/// Runs each block once and returns everything it wrote. `keep`: keeps the layer's intermediates
/// instead of recomputing them.
std::vector<Values> run_all(const ModelConfig& config, DType type, MicroBatchShape shape,
                            int threads, bool keep = false) {
  Bench b(config, type, shape, threads);
  const std::size_t last = b.architecture.blocks.size() - 1;
  const DeviceBytes out = b.activation();
  const DeviceBytes dx = b.activation();
  const DeviceBytes in = b.upload(b.activation_values(9));
  const DeviceBytes d = b.upload(b.activation_values(10));
  const auto layer = b.gradient(b.architecture.blocks[1].elements);
  const auto head = b.gradient(b.architecture.blocks[last].elements);
  const auto tied = b.gradient(config.vocab_size * config.hidden_size);
  const auto loss = b.number();
  const DeviceBytes weights = b.upload(b.weights(1));
  const DeviceBytes kept =
      keep ? b.device->allocate(b.compute->sizes().intermediates[1], "intermediates")
           : DeviceBytes();
  b.kernels().layer_forward(*b.stream, 1, weights, {}, in, out, kept);
  // A call for another layer overwrites the workspace in between.
  if (keep) b.kernels().layer_forward(*b.stream, 2, b.upload(b.weights(2)), {}, in, dx, {});
  b.kernels().layer_backward(*b.stream, 1, weights, {}, in, d, layer, Accumulation::later, kept);
  b.train_head(b.upload(b.weights(last)), b.upload(b.weights(0)), in, b.upload_tokens(b.tokens(3)),
               0.5F, dx, head, tied, Accumulation::later, loss);
  b.stream->synchronize();
  return {b.download(out), b.download(d),  b.values(layer), b.download(dx),
          b.values(head),  b.values(tied), {b.one(loss)}};
}

TEST(BlocksIn16Bits, AgreeWithFp32AsFarAsTheirPrecisionGoes) {
  for (ModelConfig config : {test::small_gpt2(), test::small_llama()}) {
    config.tie_embeddings = true;
    const auto exact = run_all(config, DType::f32, {2, 70}, 2);
    for (const auto& [type, most] : {std::pair{DType::bf16, 0.02}, std::pair{DType::f16, 0.0025}}) {
      const auto rounded = run_all(config, type, {2, 70}, 2);
      for (std::size_t i = 0; i < exact.size(); ++i) {
        EXPECT_LT(relative_error(rounded[i], exact[i]), most)
            << to_string(type) << ", result " << i;
      }
    }
  }
}

/// After clear_gradient() on accumulators full of NaN, the first micro-batch writes the gradients
/// that it would add to zeros.
TEST(FirstMicroBatch, OverwritesUnclearedMatrices) {
  for (const DType type : {DType::f32, DType::bf16}) {
    for (ModelConfig config : {test::small_gpt2(), test::small_llama()}) {
      for (const bool tied : {false, true}) {
        config.tie_embeddings = tied;
        Bench b(config, type, {2, 33}, 2);
        const std::size_t last = b.architecture.blocks.size() - 1;
        const Elems matrix = tied ? config.vocab_size * config.hidden_size : 0;
        const auto gradients = [&](float from, Accumulation accumulation) {
          const auto filled = [&](Elems size) {
            return b.gradient(std::vector<float>(size, from));
          };
          const auto layer = filled(b.architecture.blocks[1].elements);
          const auto head = filled(b.architecture.blocks[last].elements);
          const auto tied_gradient = tied ? filled(matrix) : DeviceView<float>();
          if (accumulation == Accumulation::first) {
            b.compute->clear_gradient(*b.stream, 1, layer);
            b.compute->clear_gradient(*b.stream, last, head);
          }
          const DeviceBytes in = b.upload(b.activation_values(9));
          const DeviceBytes flow = b.upload(b.activation_values(10));
          b.kernels().layer_backward(*b.stream, 1, b.upload(b.weights(1)), {}, in, flow, layer,
                                     accumulation, {});
          b.train_head(b.upload(b.weights(last)), b.upload(b.weights(0)), in,
                       b.upload_tokens(b.tokens(3)), 0.5F, flow, head, tied_gradient, accumulation,
                       b.number());
          b.stream->synchronize();
          return std::tuple{b.values(layer), b.values(head),
                            tied ? b.values(tied_gradient) : Values()};
        };
        EXPECT_EQ(gradients(std::numeric_limits<float>::quiet_NaN(), Accumulation::first),
                  gradients(0.0F, Accumulation::later))
            << config.family << (tied ? ", tied" : "");
      }
    }
  }
}

TEST(BlocksWithIntermediatesKept, GiveTheSameBits) {
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    for (const ModelConfig& config : {test::small_gpt2(), test::small_llama()}) {
      EXPECT_EQ(run_all(config, type, {2, 33}, 2, true), run_all(config, type, {2, 33}, 2, false));
    }
  }
}

TEST(BlocksWithIntermediatesKept, AreNotRecomputed) {
  for (const ModelConfig& config : {test::small_gpt2(), test::small_llama()}) {
    Bench b(config, DType::bf16, {2, 33}, 2);
    const DeviceBytes kept =
        b.device->allocate(b.compute->sizes().intermediates[1], "intermediates");
    const DeviceBytes weights = b.upload(b.weights(1));
    const DeviceBytes in = b.upload(b.activation_values(9));
    // The gradient of a layer's last matrix depends only on its intermediates.
    const auto last_gradient = [&](const DeviceBytes& of) {
      b.kernels().layer_forward(*b.stream, 1, weights, {}, in, b.activation(), kept);
      const auto gradient = b.gradient(b.architecture.blocks[1].elements);
      const DeviceBytes d = b.upload(b.activation_values(10));
      b.kernels().layer_backward(*b.stream, 1, weights, {}, of, d, gradient, Accumulation::later,
                                 kept);
      b.stream->synchronize();
      const Values all = b.values(gradient);
      const std::string matrix = config.family == "gpt2" ? "mlp.c_proj" : "mlp.down_proj";
      const auto first =
          all.begin() +
          static_cast<std::ptrdiff_t>(b.architecture.blocks[1].tensor(matrix + ".weight").offset);
      return Values(first, first + static_cast<std::ptrdiff_t>(config.hidden_size));
    };
    const Values expected = last_gradient(in);
    EXPECT_NE(expected, Values(expected.size(), 0.0));
    EXPECT_EQ(last_gradient(b.upload(b.activation_values(11))), expected);
  }
}

TEST(BlocksWithIntermediatesKept, RefuseTooLittleMemory) {
  Bench b(test::small_gpt2(), DType::bf16, {1, 8}, 1);
  const DeviceBytes kept =
      b.device->allocate(b.compute->sizes().intermediates[1] - 1, "too little");
  const DeviceBytes in = b.activation();
  EXPECT_THROW(b.kernels().layer_forward(*b.stream, 1, b.upload(b.weights(1)), {}, in, in, kept),
               Error);
}

TEST(BlocksTwice, GiveTheSameBits) {
  for (const DType type : {DType::f32, DType::bf16}) {
    for (ModelConfig config : {test::small_gpt2(), test::small_llama()}) {
      config.tie_embeddings = true;
      for (const int threads : {1, 2, 3}) {
        EXPECT_EQ(run_all(config, type, {3, 33}, threads), run_all(config, type, {3, 33}, threads));
        if (test::device_kind() == "cuda") break;
      }
    }
  }
}

TAG_TESTS("slow_sanitized,slow_scalar", "HeadInChunks.*");
TEST(HeadInChunks, GivesTheSameAsThePlainModel) {
  if (test::device_kind() == "cuda") GTEST_SKIP() << "chunks hold four times as much there";
  // Logits of 400 rows do not fit one chunk, and the last chunk is not full.
  ModelConfig config = test::small_gpt2();
  config.vocab_size = 50021;
  config.hidden_size = 6;
  config.max_sequence = 401;
  for (const DType type : {DType::f32, DType::bf16}) {
    Bench b(config, type, {1, 401});
    Reference plain{b.architecture.config, 1, 401};
    const std::size_t last = b.architecture.blocks.size() - 1;
    Values weights = b.weights(last);
    Values embedding = b.weights(0);
    Values in = b.activation_values(9);
    const auto targets = b.tokens(3);
    const DeviceBytes dx = b.activation();
    const auto gradient = b.gradient(b.architecture.blocks[last].elements);
    const auto tied = b.gradient(config.vocab_size * config.hidden_size);
    const auto loss = b.number();
    b.train_head(b.upload(weights), b.upload(embedding), b.upload(in), b.upload_tokens(targets),
                 1.0F, dx, gradient, tied, Accumulation::later, loss);
    b.stream->synchronize();
    const double expected = plain.head(weights, embedding.data(), in, targets);
    EXPECT_NEAR(b.one(loss), expected, (type == DType::f32 ? 1e-6 : 1e-3) * expected);
    if (type == DType::bf16) continue;
    const auto f = [&] { return plain.head(weights, embedding.data(), in, targets); };
    // The input of the last row, which is in the last chunk.
    const Values d = b.download(dx);
    const std::size_t i = in.size() - 2;
    EXPECT_NEAR(d[i], central_difference(f, in[i]), 1e-4);
    // Every chunk adds to the same output matrix.
    expect_derivatives(f, embedding, b.values(tied), 0, 600, "embedding");
  }
}

}  // namespace
}  // namespace ballast::model::block_test
