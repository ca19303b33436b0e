// cuDNN's attention, compared with attention in double and with Ballast's kernels: on a GPU with
// cuDNN itself, otherwise with its fake.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ballast/core/dtype.h"
#include "ballast/core/error.h"

#include "src/model/cuda/attention/attention.h"
#include "tests/support/device_array.h"
#include "tests/support/in_every_order.h"
#include "tests/support/tags.h"
#include "tests/unit/model/cuda/attention_reference.h"
#include "tests/unit/model/cuda/values.h"
#if defined(BALLAST_EMULATED_GPU)
#include "tests/support/fake_cudnn.h"
#endif

namespace ballast::model::cuda::fused_attention_test {
namespace {

using test::AttentionReference;
using test::DeviceArray;

std::vector<Bf16> random_values(std::size_t size, std::uint64_t seed) {
  return test::normals_of<Bf16>(size, seed);
}
std::string text(const AttentionShape& shape) {
  return fmt::format("{} sequences of {}, {}/{} heads of {}", shape.sequences, shape.length,
                     shape.heads, shape.kv_heads, shape.head_dim);
}

/// Odd lengths, several sequences, groups, heads of common and of other sizes.
const std::vector<AttentionShape> kShapes = {
    {2, 33, 4, 2, 64}, {1, 70, 2, 2, 128}, {3, 37, 4, 1, 8},  {2, 64, 3, 3, 80},
    {1, 65, 6, 2, 72}, {1, 40, 2, 1, 256}, {2, 5, 2, 2, 128}, {2, 1, 2, 1, 64},
};

class FusedAttentions : public test::Kernels {
 protected:
  void SetUp() override {
    test::Kernels::SetUp();
#if defined(BALLAST_EMULATED_GPU)
    test::FakeCudnn::reset();
    test::FakeCudnn::present = true;
#endif
    if (const std::string_view refusal = fused_attention_refusal(); !refusal.empty()) {
      GTEST_SKIP() << refusal;
    }
  }
};

/// Whether cuDNN has no suitable engine, as an older one on some GPUs. Any other error is
/// Ballast's.
bool is_lack_of_engines(std::string_view reason) {
  for (const std::string_view lack :
       {"NOT_SUPPORTED", "has no engine", "not deterministic", "of workspace"}) {
    if (reason.find(lack) != std::string_view::npos) return true;
  }
  return false;
}

/// cuDNN's attention for a shape, or null if cuDNN has no engine for it.
std::unique_ptr<FusedAttention> attention_of(const AttentionShape& shape) {
  try {
    return std::make_unique<FusedAttention>(shape);
  } catch (const Error& error) {
    if (!is_lack_of_engines(error.what())) throw;
    fmt::print("{}: {}\n", text(shape), error.what());
    return nullptr;
  }
}

/// Called at the end of a test of several shapes.
void skip_if_none(int tested) {
  if (tested == 0) GTEST_SKIP() << "cuDNN has no engine for attention on this GPU";
}

using Forward = std::tuple<std::vector<Bf16>, std::vector<float>>;

/// Values after the results, which must not change.
constexpr std::size_t kBehind = 1000;
const Bf16 kStays = to_bf16(3.0F);
template <class T>
std::vector<T> without_rest(std::vector<T> values, T stays) {
  const auto end = values.end() - static_cast<std::ptrdiff_t>(kBehind);
  EXPECT_TRUE(std::all_of(end, values.end(), [&](T value) { return value == stays; }));
  values.erase(end, values.end());
  return values;
}
template <class T>
std::vector<T> nans(std::size_t size, T nan, T stays) {
  std::vector<T> values(size + kBehind, stays);
  std::fill_n(values.begin(), size, nan);
  return values;
}

Forward fused(FusedAttention& attention, const AttentionShape& shape,
              const std::vector<Bf16>& qkv) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const DeviceArray<Bf16> in(qkv);
  const DeviceArray<Bf16> out(nans(shape.tokens() * shape.width(), to_bf16(kNan), kStays));
  const DeviceArray<float> log_sums(nans(shape.log_sums(), kNan, 3.0F));
  const DeviceArray<std::byte> workspace(FusedAttention::kWorkspace + 256, std::byte{0xff});
  const auto address = reinterpret_cast<std::uintptr_t>(workspace.data());
  attention.forward(nullptr, in.data(), out.data(), log_sums.data(),
                    workspace.data() + (256 - address % 256) % 256);
  EXPECT_TRUE(test::same_bits(in.get(), qkv));
  return {without_rest(out.get(), kStays), without_rest(log_sums.get(), 3.0F)};
}

TEST_F(FusedAttentions, EqualThePlainFormula) {
  int tested = 0;
  for (const AttentionShape& shape : kShapes) {
    const auto attention = attention_of(shape);
    if (attention == nullptr) continue;
    ++tested;
    const auto qkv = random_values(shape.tokens() * shape.row(), 1);
    const auto expected = AttentionReference{shape}.forward(test::exact(qkv));
    const auto [out, log_sums] = fused(*attention, shape, qkv);
    for (std::size_t i = 0; i < out.size(); ++i) {
      // Probabilities and the result are rounded to bf16.
      const double bound =
          0x1.02p-8 * (expected.out.size[i] + std::abs(expected.out.value[i])) + 4e-6;
      ASSERT_LE(std::abs(to_float(out[i]) - expected.out.value[i]), bound)
          << text(shape) << ", element " << i;
    }
    // Natural logarithms of sums that include the maximum, as the backward pass reads them.
    for (std::size_t i = 0; i < log_sums.size(); ++i) {
      ASSERT_NEAR(log_sums[i], expected.log_sums[i], 4e-5) << text(shape) << ", row " << i;
    }
  }
  skip_if_none(tested);
}

TEST_F(FusedAttentions, GiveTheSameBitsEachTime) {
  int tested = 0;
  for (const AttentionShape& shape : {AttentionShape{2, 130, 4, 2, 64}, {1, 65, 2, 1, 128}}) {
    const auto attention = attention_of(shape);
    if (attention == nullptr) continue;
    ++tested;
    const auto qkv = random_values(shape.tokens() * shape.row(), 2);
    const Forward once = fused(*attention, shape, qkv);
    EXPECT_TRUE(test::same_bits(fused(*attention, shape, qkv), once)) << text(shape);
    FusedAttention another(shape);
    EXPECT_TRUE(test::same_bits(fused(another, shape, qkv), once)) << text(shape);
  }
  skip_if_none(tested);
}

TAG_TESTS("small_shapes", "FusedAttentions.OwnBackwardPassUsesTheirResults");
TEST_F(FusedAttentions, OwnBackwardPassUsesTheirResults) {
  const AttentionShape shape{2, 67, 4, 2, 64};
  const auto attention = attention_of(shape);
  if (attention == nullptr) return skip_if_none(0);
  const auto qkv = random_values(shape.tokens() * shape.row(), 3);
  const auto dout = random_values(shape.tokens() * shape.width(), 4);
  const auto [out, log_sums] = fused(*attention, shape, qkv);
  const DeviceArray<Bf16> in(qkv);
  const DeviceArray<Bf16> result(out);
  const DeviceArray<float> sums(log_sums);
  const DeviceArray<Bf16> gradient(dout);
  const DeviceArray<Bf16> dqkv(qkv.size());
  const DeviceArray<std::byte> scratch(attention_scratch_bytes(shape, sizeof(Bf16)));
  ASSERT_EQ(attention_backward<Bf16>(nullptr, shape, in.data(), result.data(), sums.data(),
                                     gradient.data(), dqkv.data(), scratch.data()),
            cudaSuccess);
  const auto expected =
      AttentionReference{shape}.backward(test::exact(qkv), test::exact(out), test::exact(dout));
  const auto found = dqkv.get();
  for (std::size_t i = 0; i < found.size(); ++i) {
    const double bound = 0x1.04p-8 * (expected.size[i] + std::abs(expected.value[i])) + 4e-6;
    ASSERT_LE(std::abs(to_float(found[i]) - expected.value[i]), bound) << i;
  }
}

#if !defined(BALLAST_EMULATED_GPU)
/// Milliseconds of one call: the median of several after a warm-up.
template <class Call>
float milliseconds(const Call& call) {
  cudaEvent_t start = nullptr;
  cudaEvent_t end = nullptr;
  test::must(cudaEventCreate(&start));
  test::must(cudaEventCreate(&end));
  call();
  std::vector<float> times(9);
  for (float& time : times) {
    test::must(cudaEventRecord(start, nullptr));
    call();
    test::must(cudaEventRecord(end, nullptr));
    test::must(cudaEventSynchronize(end));
    test::must(cudaEventElapsedTime(&time, start, end));
  }
  test::must(cudaEventDestroy(start));
  test::must(cudaEventDestroy(end));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

TEST_F(FusedAttentions, DifferFromOurKernelsByRoundingOnly) {
  int tested = 0;
  for (const AttentionShape& shape :
       {AttentionShape{2, 4096, 32, 8, 128}, {4, 2048, 16, 16, 64}, {8, 1023, 12, 12, 64}}) {
    const auto attention = attention_of(shape);
    if (attention == nullptr) continue;
    ++tested;
    const DeviceArray<Bf16> in(random_values(shape.tokens() * shape.row(), 5));
    const std::size_t size = shape.tokens() * shape.width();
    const DeviceArray<Bf16> theirs(size);
    const DeviceArray<Bf16> ours(size);
    const DeviceArray<float> their_sums(shape.log_sums());
    const DeviceArray<float> our_sums(shape.log_sums());
    const DeviceArray<std::byte> workspace(FusedAttention::kWorkspace);
    const float theirs_ms = milliseconds([&] {
      attention->forward(nullptr, in.data(), theirs.data(), their_sums.data(), workspace.data());
    });
    const float ours_ms = milliseconds([&] {
      test::must(cuda::attention<Bf16>(nullptr, shape, in.data(), ours.data(), our_sums.data()));
    });
    fmt::print("{}: ours {:.3f} ms, cuDNN's {:.3f} ms, ratio {:.2f}\n", text(shape), ours_ms,
               theirs_ms, ours_ms / theirs_ms);
    const auto a = theirs.get();
    const auto b = ours.get();
    for (std::size_t i = 0; i < size; ++i) {
      // Values are at most about 1 divided by the root of the number of visible keys.
      ASSERT_NEAR(to_float(a[i]), to_float(b[i]), 0x1p-6 * std::abs(to_float(b[i])) + 0x1p-8)
          << text(shape) << ", element " << i;
    }
    const auto their_logarithms = their_sums.get();
    const auto our_logarithms = our_sums.get();
    for (std::size_t i = 0; i < our_logarithms.size(); ++i) {
      ASSERT_NEAR(their_logarithms[i], our_logarithms[i], 1e-4) << text(shape) << ", row " << i;
    }
  }
  skip_if_none(tested);
}
#else
/// A program whose other tests are skipped where cuDNN has no engine must not skip them elsewhere.
TEST_F(FusedAttentions, WithoutAnEngineAShapeIsLeftOut) {
  EXPECT_NE(attention_of(kShapes.front()), nullptr);
  test::FakeCudnn::engines = {};
  EXPECT_EQ(attention_of(kShapes.front()), nullptr);
  test::FakeCudnn::engines = {test::FakeCudnn::Engine{.same_bits = false}};
  EXPECT_EQ(attention_of(kShapes.front()), nullptr);
  test::FakeCudnn::reset();
  test::FakeCudnn::present = false;
  EXPECT_THROW(attention_of(kShapes.front()), Error);
}
#endif

}  // namespace
}  // namespace ballast::model::cuda::fused_attention_test
