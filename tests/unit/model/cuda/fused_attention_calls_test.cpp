// Calls to cuDNN and the handling of its refusals, on a fake of cuDNN.
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/device/device.h"
#include "ballast/model/attention.h"

#include "src/model/cuda/attention/attention.h"
#include "src/model/cuda/cudnn/cudnn.h"
#include "tests/support/captured_log.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/fake_cudnn.h"
#include "tests/support/in_every_order.h"
#include "tests/unit/model/fixture.h"

namespace ballast::model::cuda::fused_attention_calls_test {
namespace {

using test::Bench;
using test::CapturedLog;
using test::FakeCudnn;

constexpr AttentionShape kShape = {2, 5, 4, 2, 8};

class FusedAttentionCalls : public testing::Test {
 protected:
  FusedAttentionCalls() {
    FakeCudnn::reset();
    FakeCudnn::present = true;
  }
  ~FusedAttentionCalls() override {
    EXPECT_EQ(FakeCudnn::alive, 0);
    FakeCudnn::reset();
  }

  /// The reason why cuDNN attention is unavailable, or "".
  static std::string refusal() {
    try {
      const FusedAttention attention(kShape);
      return "";
    } catch (const Error& error) {
      EXPECT_EQ(error.category(), ErrorCategory::device);
      return error.what();
    }
  }
};

TEST_F(FusedAttentionCalls, ThereIsOnePlanForAllCalls) {
  alignas(256) static std::byte workspace[512];
  const std::vector<Bf16> qkv(kShape.tokens() * kShape.row());
  std::vector<Bf16> out(kShape.tokens() * kShape.width());
  std::vector<float> log_sums(kShape.log_sums());
  int any = 0;
  auto* const stream = reinterpret_cast<cudaStream_t>(&any);
  FusedAttention attention(kShape);
  for (int i = 0; i < 3; ++i) {
    attention.forward(stream, qkv.data(), out.data(), log_sums.data(), workspace);
  }
  EXPECT_EQ(FakeCudnn::plans, 1);
  EXPECT_EQ(FakeCudnn::executions, 3);
  EXPECT_EQ(FakeCudnn::stream, stream);
  EXPECT_EQ(FakeCudnn::workspace, 256);
}

TEST_F(FusedAttentionCalls, AnExecutionThatFailsIsOneLine) {
  alignas(256) static std::byte workspace[512];
  const std::vector<Bf16> qkv(kShape.tokens() * kShape.row());
  std::vector<Bf16> out(kShape.tokens() * kShape.width());
  std::vector<float> log_sums(kShape.log_sums());
  FusedAttention attention(kShape);
  const auto failure = [&](void* space) -> std::string {
    try {
      attention.forward(nullptr, qkv.data(), out.data(), log_sums.data(), space);
      return "";
    } catch (const Error& error) {
      EXPECT_EQ(error.category(), ErrorCategory::device);
      return error.what();
    }
  };
  FakeCudnn::next_execution = CUDNN_STATUS_EXECUTION_FAILED;
  EXPECT_EQ(failure(workspace), "cuDNN: attention: CUDNN_STATUS_EXECUTION_FAILED (as it was told)");
  EXPECT_EQ(failure(nullptr), "cuDNN: attention: CUDNN_STATUS_BAD_PARAM (no workspace)");
  EXPECT_EQ(failure(workspace), "");
}

TEST_F(FusedAttentionCalls, ARefusalSaysWhy) {
  FakeCudnn::engines = {};
  EXPECT_EQ(refusal(), "cuDNN has no engine for attention on this GPU");
  FakeCudnn::engines = {{.same_bits = false}};
  EXPECT_EQ(refusal(), "cuDNN: its engine for attention is not deterministic");
  FakeCudnn::engines = {{.workspace = FusedAttention::kWorkspace + 1}};
  EXPECT_EQ(refusal(), "cuDNN: its engine needs 1048577 bytes of workspace, but has only 1048576");
  FakeCudnn::engines = {{.planned = CUDNN_STATUS_NOT_SUPPORTED}};
  EXPECT_EQ(
      refusal(),
      "cuDNN: finalizing an execution plan: CUDNN_STATUS_NOT_SUPPORTED (it cannot be planned)");
  FakeCudnn::engines = {{}};
  FakeCudnn::next_start = CUDNN_STATUS_NOT_INITIALIZED;
  EXPECT_EQ(refusal().find("cuDNN: creating a handle: CUDNN_STATUS_NOT_INITIALIZED"), 0U);
  EXPECT_EQ(refusal(), "");
  FakeCudnn::present = false;
  EXPECT_EQ(refusal(), "libcudnn.so.9 cannot be loaded: a test has none");
  EXPECT_EQ(fused_attention_refusal(), "libcudnn.so.9 cannot be loaded: a test has none");
}

TEST_F(FusedAttentionCalls, TheFirstSuitableEngineIsUsed) {
  FakeCudnn::engines = {{.same_bits = false},
                        {.workspace = std::int64_t{1} << 40U},
                        {.planned = CUDNN_STATUS_NOT_SUPPORTED},
                        {.workspace = FusedAttention::kWorkspace},
                        {.workspace = 0}};
  EXPECT_EQ(refusal(), "");
  EXPECT_EQ(FakeCudnn::plans, 3);
  FakeCudnn::engines = {{.same_bits = false}};
  FakeCudnn::last_resorts = {{.workspace = 0}};
  EXPECT_EQ(refusal(), "");
  EXPECT_EQ(FakeCudnn::plans, 4);
}

TEST_F(FusedAttentionCalls, AnAttributeThatIsRefusedIsNamed) {
  const CudnnCalls calls(cudnn());
  const Descriptor tensor = calls.make(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  try {
    calls.set(tensor, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_DATA_FLOAT);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "cuDNN: setting attribute 1500: CUDNN_STATUS_BAD_PARAM (an attribute of others)");
  }
}

/// A layer's forward pass on the CUDA device.
std::vector<double> layer(DType type, AttentionBackend by) {
  setenv("BALLAST_TEST_DEVICE", "cuda", 1);
  Bench b(test::small_llama(), type, {2, 9});
  b.compute = make_compute(*b.device, b.architecture, type, b.shape, {.attention = by});
  b.compute->set_workspace(b.device->allocate(b.compute->sizes().workspace, "workspace"));
  const DeviceBytes weights = b.upload(b.weights(1));
  const DeviceBytes in = b.upload(b.activation_values(7));
  const DeviceBytes out = b.activation();
  b.kernels().layer_forward(*b.stream, 1, weights, {}, in, out, {});
  b.kernels().layer_forward(*b.stream, 1, weights, {}, in, out, {});
  return b.download(out);
}

TEST_F(FusedAttentionCalls, ALayerUsesTheChosenKernels) {
  const auto own = layer(DType::bf16, AttentionBackend::own);
  EXPECT_EQ(FakeCudnn::executions, 0);
  const CapturedLog log;
  for (const AttentionBackend by : {AttentionBackend::best, AttentionBackend::cudnn}) {
    FakeCudnn::plans = FakeCudnn::executions = 0;
    const auto found = layer(DType::bf16, by);
    EXPECT_EQ(FakeCudnn::plans, 1);
    EXPECT_EQ(FakeCudnn::executions, 2);
    EXPECT_LT(test::relative_error(found, own), 0.01);
    EXPECT_GT(test::relative_error(found, own), 0.0) << "probabilities are rounded elsewhere";
  }
  EXPECT_EQ(log.text(), "");
}

TEST_F(FusedAttentionCalls, WithoutCudnnOurKernelsAttendAndTheLogSaysWhyOnce) {
  const auto own = layer(DType::bf16, AttentionBackend::own);
  const auto without = [&] {
    const CapturedLog log;
    EXPECT_TRUE(test::same_bits(layer(DType::bf16, AttentionBackend::best), own));
    return log.text();
  };
  FakeCudnn::engines = {{.same_bits = false}};
  EXPECT_EQ(without(),
            "attention: using Ballast's kernels, because cuDNN: its engine for attention is not "
            "deterministic\n");
  FakeCudnn::present = false;
  EXPECT_EQ(without(),
            "attention: using Ballast's kernels, because libcudnn.so.9 cannot be loaded: a test "
            "has none\n");
  EXPECT_EQ(FakeCudnn::executions, 0);
}

TEST_F(FusedAttentionCalls, RequestedButMissingCudnnIsAnError) {
  const auto failure = [](DType type) -> std::string {
    try {
      layer(type, AttentionBackend::cudnn);
      return "";
    } catch (const Error& error) {
      return error.what();
    }
  };
  FakeCudnn::engines = {};
  EXPECT_EQ(failure(DType::bf16),
            "ballast.attention is \"cudnn\", but cuDNN has no engine for attention on this GPU");
  FakeCudnn::present = false;
  EXPECT_EQ(failure(DType::bf16),
            "ballast.attention is \"cudnn\", but libcudnn.so.9 cannot be loaded: a test has none");
  EXPECT_EQ(failure(DType::f32),
            "ballast.attention is \"cudnn\", which supports bf16 only; enable bf16 or set "
            "ballast.attention to \"own\"");
}

TEST_F(FusedAttentionCalls, Fp32AlwaysUsesOwnKernels) {
  const CapturedLog log;
  EXPECT_TRUE(test::same_bits(layer(DType::f32, AttentionBackend::best),
                              layer(DType::f32, AttentionBackend::own)));
  EXPECT_EQ(FakeCudnn::plans, 0);
  EXPECT_EQ(log.text(), "");
}

TEST_F(FusedAttentionCalls, ATrialRunsTheAvailableKernels) {
  const AttentionShape extents = {
      .sequences = 2, .length = 9, .heads = 4, .kv_heads = 2, .head_dim = 16};
  const auto device =
      device::make_device({.kind = "cuda", .budget = attention_trial_bytes(extents)});
  const auto trial = make_attention_trial(*device, extents);
  EXPECT_EQ(trial->cudnn_refusal(), "");
  trial->run(AttentionPass::cudnn_forward, 3);
  EXPECT_EQ(FakeCudnn::executions, 3);
  trial->run(AttentionPass::own_forward, 2);
  trial->run(AttentionPass::own_backward, 2);
  EXPECT_EQ(FakeCudnn::executions, 3);
}

TEST_F(FusedAttentionCalls, ATrialWithoutCudnnSaysWhy) {
  FakeCudnn::engines = {};
  const AttentionShape extents = {.length = 8, .head_dim = 8};
  const auto device =
      device::make_device({.kind = "cuda", .budget = attention_trial_bytes(extents)});
  const auto trial = make_attention_trial(*device, extents);
  EXPECT_EQ(trial->cudnn_refusal(), "cuDNN has no engine for attention on this GPU");
  trial->run(AttentionPass::own_forward, 1);
}

TEST_F(FusedAttentionCalls, ATrialRunsTheWidestHeads) {
  const AttentionShape extents = {.length = 8, .head_dim = 512};
  const auto device =
      device::make_device({.kind = "cuda", .budget = attention_trial_bytes(extents)});
  const auto trial = make_attention_trial(*device, extents);
  trial->run(AttentionPass::own_forward, 1);
  trial->run(AttentionPass::own_backward, 1);
}

TEST_F(FusedAttentionCalls, ATrialOfExtentsThatNoKernelDoesIsRefused) {
  for (const AttentionShape& extents :
       {AttentionShape{.head_dim = 12}, AttentionShape{.head_dim = 520},
        AttentionShape{.heads = 3, .kv_heads = 2}, AttentionShape{.sequences = 0}}) {
    EXPECT_THROW(attention_trial_bytes(extents), Error);
  }
}

TEST(AttentionGrids, HoldSequencesOfMillionsOfTokens) {
  using test::FakeCuda;
  const AttentionShape shape = {.length = std::size_t{1} << 21U, .head_dim = 8};
  const auto refusal = [&](auto&& launch) {
    FakeCuda::kernels_until_fault = 0;  // no kernel runs
    const cudaError_t code = launch();
    static_cast<void>(cudaDeviceSynchronize());
    FakeCuda::fault = cudaSuccess;
    FakeCuda::kernels_until_fault = -1;
    return code;
  };
  // The fault may be reported at once.
  const auto accepted = [](cudaError_t code) {
    return code == cudaSuccess || code == cudaErrorIllegalAddress;
  };
  EXPECT_PRED1(accepted, refusal([&] {
                 return plain_attention<float>(nullptr, shape, nullptr, nullptr, nullptr);
               }));
  EXPECT_PRED1(accepted, refusal([&] {
                 return plain_attention_backward<float>(nullptr, shape, nullptr, nullptr, nullptr,
                                                        nullptr, nullptr, nullptr);
               }));
}

TEST(AttentionFlops, CountHalfOfAllPairs) {
  const AttentionShape extents = {
      .sequences = 2, .length = 10, .heads = 3, .kv_heads = 1, .head_dim = 8};
  // 2 x 3 heads, 50 pairs of positions, 8 products and 8 sums each, twice or five times.
  EXPECT_EQ(attention_flops(extents, AttentionPass::own_forward), 2 * 6 * 50 * 16.0);
  EXPECT_EQ(attention_flops(extents, AttentionPass::cudnn_forward), 2 * 6 * 50 * 16.0);
  EXPECT_EQ(attention_flops(extents, AttentionPass::own_backward), 5 * 6 * 50 * 16.0);
}

}  // namespace
}  // namespace ballast::model::cuda::fused_attention_calls_test
