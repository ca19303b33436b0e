#include "ballast/model/compute.h"

#include <bit>
#include <cmath>
#include <limits>
#include <string>

#include <gtest/gtest.h>

#include "ballast/core/error.h"

#include "src/model/host/kernel_tables.h"
#include "tests/unit/model/fixture.h"

namespace ballast::model::compute_test {
namespace {

using test::Bench;
using test::normals;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// A model whose embedding block is larger than one chunk of partial sums.
ModelConfig wide_gpt2() {
  ModelConfig config = test::small_gpt2();
  config.vocab_size = 4000;
  return config;
}

TEST(PackGradient, RoundsToNearestEvenAndSumsSquares) {
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    for (const int threads : {1, 3}) {
      Bench b(wide_gpt2(), type, {1, 4}, threads);
      const Elems size = b.architecture.blocks[0].elements;
      const auto values = normals<float>(size, 1);
      const auto gradient = b.gradient(values);
      const DeviceBytes packed = b.device->allocate(size * size_of(type), "packed");
      const auto stats = view_as<GradientStats>(b.device->allocate(sizeof(GradientStats), "stats"));
      b.compute->pack_gradient(*b.stream, 1, {.own = gradient}, packed, stats);
      b.stream->synchronize();

      const auto got = b.download(packed);
      double squares = 0.0;
      for (Elems i = 0; i < size; ++i) {
        const float expected = with_training_type(
            type, [&](auto value) { return to_float(from_float<decltype(value)>(values[i])); });
        ASSERT_EQ(got[i], static_cast<double>(expected)) << i;
        squares += got[i] * got[i];
      }
      EXPECT_NEAR(b.one(stats).sum_of_squares, squares, 1e-12 * squares);
      EXPECT_EQ(b.one(stats).non_finite, 0U);
    }
  }
}

TEST(PackGradient, CountsWhatIsNotFiniteAfterRounding) {
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    Bench b(wide_gpt2(), type, {1, 4});
    const Elems size = b.architecture.blocks[0].elements;
    std::vector<float> values(size);
    values[0] = kInfinity;
    values[70000] = -kInfinity;
    values[size - 1] = std::numeric_limits<float>::quiet_NaN();
    // Numbers that round to infinity in 16 bits only, the second one in fp16 only.
    values[5] = std::numeric_limits<float>::max();
    values[6] = 65520.0F;
    values[7] = 65519.0F;
    const auto gradient = b.gradient(values);
    const DeviceBytes packed = b.device->allocate(size * size_of(type), "packed");
    const auto stats = view_as<GradientStats>(b.device->allocate(sizeof(GradientStats), "stats"));
    b.compute->pack_gradient(*b.stream, 1, {.own = gradient}, packed, stats);
    b.stream->synchronize();
    EXPECT_EQ(b.one(stats).non_finite, type == DType::f32 ? 3U : type == DType::bf16 ? 4U : 5U);
    EXPECT_TRUE(std::isnan(b.download(packed).back()));
  }
}

TEST(Zero, ClearsTheWholeAccumulator) {
  Bench b(test::small_gpt2(), DType::f32, {1, 4}, 3);
  const auto gradient = b.gradient(std::vector<float>(12345, 1.0F));
  b.compute->zero(*b.stream, gradient);
  b.stream->synchronize();
  EXPECT_EQ(b.values(gradient), std::vector<double>(12345, 0.0));
}

/// A device of a kind that has no kernels.
class Abacus final : public device::Device {
 public:
  std::string_view kind() const override { return "abacus"; }
  std::string description() const override { return "an abacus"; }
  DeviceBytes allocate(Bytes, std::string_view) override { return {}; }
  Bytes budget() const override { return 0; }
  Bytes allocated() const override { return 0; }
  std::unique_ptr<device::Stream> make_stream(std::string_view) override { return nullptr; }
  std::unique_ptr<device::Event> make_event() override { return nullptr; }
  std::unique_ptr<device::Pin> pin(HostBytes, std::string_view) override { return nullptr; }
  void copy_to_device(device::Stream&, DeviceBytes, ConstHostBytes) override {}
  void copy_to_host(device::Stream&, HostBytes, ConstDeviceBytes) override {}
  bool connect(device::Device&) override { return false; }
  void copy_to_other(device::Stream&, device::Device&, DeviceBytes, ConstDeviceBytes) override {}
};

TEST(MakeCompute, NamesADeviceWithoutKernels) {
  Abacus abacus;
  const Architecture model = build_architecture(test::small_gpt2());
  try {
    make_compute(abacus, model, DType::f32, {1, 8});
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::device);
    EXPECT_NE(std::string(error.what()).find("abacus"), std::string::npos);
  }
  EXPECT_THROW(measure_gemm_peak(abacus, DType::f32), Error);
}

TEST(MakeCompute, RefusesUnsupportedShapes) {
  device::DeviceOptions options;
  options.kind = "host";
  options.budget = kMiB;
  const auto device = device::make_device(options);
  const Architecture model = build_architecture(test::small_gpt2());
  EXPECT_THROW(make_compute(*device, model, DType::f32, {1, 81}), Error);
  EXPECT_THROW(make_compute(*device, model, DType::f32, {0, 8}), Error);
  const auto compute = make_compute(*device, model, DType::f32, {1, 80});
  EXPECT_EQ(compute->activation_bytes(), 80U * model.config.hidden_size * 4U);
  const auto stream = device->make_stream("compute");
  const Elems elements = model.blocks[0].own_trained_elements();
  const auto sums = device->allocate(elements * sizeof(float), "gradient sums");
  EXPECT_THROW(compute->clear_gradient(*stream, 0, view_as<float>(sums)), Error);
  EXPECT_THROW(compute->set_workspace(device->allocate(64, "too small")), Error);
}

/// The head of a large vocabulary needs more memory than a layer; it must not overwrite the memory
/// that a layer keeps from call to call.
TEST(Workspace, LayersComputeTheSameBeforeAndAfterTheHead) {
  ModelConfig config = test::small_llama();
  config.vocab_size = 4000;
  Bench b(config, DType::f32, {1, 16});
  const DeviceBytes weights = b.upload(b.weights(1));
  const DeviceBytes in = b.upload(b.activation_values(1));
  const auto layer = [&] {
    const DeviceBytes out = b.activation();
    b.kernels().layer_forward(*b.stream, 1, weights, {}, in, out, {});
    return b.download(out);
  };
  const std::vector<double> before = layer();
  const auto targets = b.upload_tokens(b.tokens(2));
  const auto gradient = b.gradient(b.architecture.blocks.back().elements);
  b.train_head(b.upload(b.weights(3)), {}, in, targets, 1.0F, b.activation(), gradient, {},
               Accumulation::later, b.number());
  EXPECT_EQ(layer(), before);
}

/// Expects that Compute::run() refuses the pass with a message that contains `text`.
void expect_refusal(const Bench& b, const Pass& pass, const PassArguments& arguments,
                    const std::string& text) {
  try {
    b.compute->run(*b.stream, pass, arguments);
    ADD_FAILURE() << "no error: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::state);
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

TEST(Passes, AreRefusedWithKernelAndPort) {
  Bench b(test::small_llama(), DType::f32, {1, 4});
  Pass pass = {.kernel = Kernel::layer, .block = 1};
  pass.operands = {{.port = Port::weights},
                   {.port = Port::input},
                   {.port = Port::output},
                   {.port = Port::kept, .optional = true}};
  PassArguments arguments;
  arguments[Port::weights] = b.upload(b.weights(1));
  arguments[Port::input] = b.activation();
  expect_refusal(b, pass, arguments, "layer of block 1: the argument for output is missing");
  arguments[Port::output] = b.activation();
  EXPECT_NO_THROW(b.compute->run(*b.stream, pass, arguments));
  const Bytes needed = b.compute->sizes().intermediates[1];
  arguments[Port::kept] = b.device->allocate(needed - 1, "kept");
  expect_refusal(
      b, pass, arguments,
      "kept has " + std::to_string(needed - 1) + " bytes and needs " + std::to_string(needed));
  pass.block = 0;
  expect_refusal(b, pass, arguments, "layer of block 0");
  b.stream->synchronize();
}

TEST(Tokens, OutsideTheVocabularyAreAnErrorOfTheData) {
  Bench b(test::small_gpt2(), DType::f32, {1, 4});
  const auto tokens = b.upload_tokens({1, 2, 61, 3});
  b.kernels().embedding_forward(*b.stream, 0, b.upload(b.weights(0)), tokens, {}, b.activation());
  try {
    b.stream->synchronize();
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::data);
  }
}

TEST(Loss, IsNotANumberWhenTheActivationsAreNot) {
  Bench b(test::small_gpt2(), DType::bf16, {1, 4});
  auto in = b.activation_values(1);
  in[40] = std::numeric_limits<double>::quiet_NaN();
  const auto loss = b.number();
  b.kernels().head_forward(*b.stream, b.upload(b.weights(3)), b.upload(b.weights(0)), b.upload(in),
                           b.upload_tokens({1, 2, 3, 4}), loss);
  b.stream->synchronize();
  EXPECT_TRUE(std::isnan(b.one(loss)));
}

TEST(Workspace, GrowsLinearlyWithTheSequence) {
  device::DeviceOptions options;
  options.kind = "host";
  options.budget = kMiB;
  const auto device = device::make_device(options);
  ModelConfig config = test::small_llama();
  const Architecture model = build_architecture(config);
  const auto bytes = [&](std::uint64_t length) {
    return static_cast<double>(
        make_compute(*device, model, DType::bf16, {1, length})->sizes().workspace);
  };
  EXPECT_LT(bytes(16384) / bytes(8192), 2.01);
}

TEST(Workspace, HoldsTheMlpOfAFewRowsOfLongSequences) {
  ModelConfig config = test::small_llama();
  config.intermediate_size = 4096;
  constexpr MicroBatchShape kShape = {1, 131072};
  const KernelSizes memory =
      kernel_memory(build_architecture(config), DType::f32, kShape, test::device_kind(), 1);
  const Bytes mlp = kShape.tokens() * 3 * config.intermediate_size * sizeof(float);
  EXPECT_GT(memory.intermediates[1], mlp);
  EXPECT_LT(memory.workspace, mlp / 4);
}

TEST(Workspace, IsKnownWithoutADevice) {
  device::DeviceOptions options;
  options.kind = "host";
  options.budget = kMiB;
  for (const int threads : {0, 1, 3}) {
    options.compute_threads = threads;
    const auto device = device::make_device(options);
    for (const auto& config : {test::small_gpt2(), test::small_llama()}) {
      const Architecture model = build_architecture(config);
      for (const DType type : {DType::f32, DType::bf16}) {
        for (const std::uint64_t sequences : {1, 5}) {
          const MicroBatchShape shape{sequences, 33};
          const KernelSizes memory = kernel_memory(model, type, shape, "host", threads);
          const auto compute = make_compute(*device, model, type, shape);
          EXPECT_EQ(memory.workspace, compute->sizes().workspace);
          EXPECT_EQ(memory.intermediates, compute->sizes().intermediates);
        }
      }
    }
  }
}

TEST(Workspace, IsRefusedWhenTheKernelsAreRefused) {
  const Architecture model = build_architecture(test::small_gpt2());
  const auto refuses = [&](DType type, MicroBatchShape shape, std::string_view kind) {
    EXPECT_THROW(static_cast<void>(kernel_memory(model, type, shape, kind)), Error);
  };
  refuses(DType::bf16, {1, 16}, "abacus");
  refuses(DType::bf16, {0, 16}, "host");
  refuses(DType::bf16, {1, 81}, "host");
}

TEST(GemmPeak, IsARate) {
  device::DeviceOptions options;
  options.kind = "host";
  options.budget = kMiB;
  const auto device = device::make_device(options);
  EXPECT_GT(measure_gemm_peak(*device, DType::f32, 0.01), 1e6);
  EXPECT_GT(measure_gemm_peak(*device, DType::bf16, 0.01), 1e6);
}

TEST(KernelTables, AgreeWithEachOther) {
  const auto tables = host::kernel_tables();
  ASSERT_FALSE(tables.empty());
  EXPECT_EQ(tables.front()->isa, Isa::scalar);
  constexpr std::size_t kSize = 61;
  const auto x = normals<float>(kSize, 1, 2.0);
  std::vector<float> expected(kSize);
  tables.front()->f32.rows.activations.front().activate(x.data(), expected.data(), kSize);
  for (const host::KernelTable* table : tables) {
    std::vector<float> y(kSize);
    table->f32.rows.activations.front().activate(x.data(), y.data(), kSize);
    for (std::size_t i = 0; i < kSize; ++i) {
      EXPECT_NEAR(y[i], expected[i], 1e-6F * std::max(1.0F, std::abs(expected[i])));
    }
  }
}

/// All numbers of a 16-bit type, and fp32 numbers at and around the middle of each two neighbours.
template <class T>
void expect_the_scalar_conversions() {
  std::vector<float> values;
  for (std::uint32_t high = 0; high < 0x10000U; ++high) {
    for (const std::uint32_t low : {0x0U, 0x1U, 0x7fffU, 0x8000U, 0x8001U, 0xffffU}) {
      values.push_back(std::bit_cast<float>(high << 16 | low));
    }
    // fp16 has fewer digits of normal numbers than bf16, and more of denormal ones.
    const auto number = std::bit_cast<std::uint32_t>(to_float(T{static_cast<std::uint16_t>(high)}));
    for (const std::uint32_t step : {0x0U, 0xfffU, 0x1000U, 0x1001U}) {
      values.push_back(std::bit_cast<float>(number + step));
    }
  }
  std::vector<T> all(0x10000U);
  for (std::uint32_t bits = 0; bits < all.size(); ++bits) {
    all[bits].bits = static_cast<std::uint16_t>(bits);
  }
  for (const host::KernelTable* table : host::kernel_tables()) {
    const host::RowKernels<T>& rows = host::kernels_of<T>(*table).rows;
    std::vector<T> rounded(values.size());
    rows.convert(values.data(), values.size(), rounded.data(), values.size(), 1, values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(rounded[i].bits, from_float<T>(values[i]).bits)
          << to_string(table->isa) << ", " << std::hex << std::bit_cast<std::uint32_t>(values[i]);
    }
    std::vector<float> widened(all.size());
    for (const std::size_t size : {all.size(), std::size_t{1019}}) {
      rows.widen(all.data(), widened.data(), size);
      for (std::size_t i = 0; i < size; ++i) {
        ASSERT_EQ(std::bit_cast<std::uint32_t>(widened[i]),
                  std::bit_cast<std::uint32_t>(to_float(all[i])))
            << to_string(table->isa) << ", " << std::hex << i;
      }
    }
  }
}

TEST(KernelTables, ConvertAsTheScalarFunctionsDo) {
  expect_the_scalar_conversions<Bf16>();
  expect_the_scalar_conversions<F16>();
}

}  // namespace
}  // namespace ballast::model::compute_test
