// Tests the loading of cuDNN, and the real library's answers for Ballast's graph. Needs no GPU:
// cuDNN plans for GPUs that are only described, until it needs the driver. Tests that need the
// library are skipped without it.
#include "src/model/cuda/cudnn/cudnn.h"

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ballast/core/error.h"

#include "src/model/cuda/attention/attention.h"

namespace ballast::model::cuda::cudnn_test {
namespace {

std::string refusal_of(const std::vector<std::string>& names) {
  const LoadedCudnn loaded = load_cudnn(names);
  EXPECT_EQ(loaded.functions.execute, nullptr);
  return loaded.refusal;
}

TEST(CudnnLoader, AMissingLibraryIsNamedInOneLine) {
  EXPECT_EQ(refusal_of({"libthere-is-no-such.so.9", "libnor-this.so"}),
            "libthere-is-no-such.so.9 cannot be loaded: cannot open shared object file: No such "
            "file or directory; install cuDNN or add its folder to LD_LIBRARY_PATH");
}

TEST(CudnnLoader, ALibraryWithoutTheFunctionsIsRefused) {
  const std::string refusal = refusal_of({"libm.so.6"});
  EXPECT_EQ(
      refusal.find("libm.so.6 cannot be loaded: it lacks the function cudnnGetVersion; install"),
      0U)
      << refusal;
}

std::string refusal_of_version(std::size_t (*version)()) {
  return Cudnn{.version = version}.refusal();
}
TEST(CudnnLoader, AnotherMajorVersionAndAnOldOneAreRefused) {
  EXPECT_EQ(refusal_of_version([]() -> std::size_t { return 80907; }),
            "it is version 8.9.7, but this program needs version 9");
  EXPECT_EQ(refusal_of_version([]() -> std::size_t { return 91001; }),
            "it is version 9.10.1, but attention needs at least 9.10.2");
  EXPECT_EQ(refusal_of_version([]() -> std::size_t { return 91002; }), "");
  EXPECT_EQ(refusal_of_version([]() -> std::size_t { return 92200; }), "");
}

TEST(CudnnLoader, WithoutAGpuAttentionSaysSo) {
  if (!fused_attention_refusal().empty()) GTEST_SKIP() << fused_attention_refusal();
  int devices = 0;
  if (cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0) GTEST_SKIP() << "there is a GPU";
  try {
    const FusedAttention attention({1, 64, 2, 1, 64});
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::device);
    const std::string_view line = error.what();
    EXPECT_EQ(line.find("cuDNN: creating a handle: CUDNN_STATUS_"), 0U) << line;
    EXPECT_EQ(line.find('\n'), std::string_view::npos);
  }
}

/// cuDNN's description of a GPU with this compute capability times 100.
Descriptor described_gpu(const CudnnCalls& calls, int capability, int shared_memory) {
  const std::string text = fmt::format(
      R"({{"deviceVer":{},"driverVer":13000,"cudaDeviceId":0,)"
      R"("maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],)"
      R"("regsPerBlock":65536,"multiProcessorCount":108,"warpSize":32,)"
      R"("maxSharedMemoryPerBlock":49152,"maxSharedMemoryPerBlockOptin":{},)"
      R"("reservedSharedMemoryPerBlock":1024,"maxRegistersPerSM":65536,"maxCtasPerSM":24,)"
      R"("maxThreadsPerBlock":1024,"maxThreadsPerSM":1536,"pciDeviceId":0,"isTccDriver":0,)"
      R"("supportCoopLaunch":1,"smClockRateKHz":1500000,"memClockRateKHz":3000000,)"
      R"("l2CacheSize":41943040,"totalGlobalMem":25000000000,"deviceName":"any"}})",
      capability, shared_memory);
  Descriptor gpu = calls.make(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
  calls.check(calls.library().set_attribute(gpu.get(), CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION,
                                            CUDNN_TYPE_CHAR, static_cast<std::int64_t>(text.size()),
                                            text.data()),
              "describing a GPU");
  calls.finish(gpu, "a GPU");
  return gpu;
}

/// The engines that cuDNN finds for the graph on that GPU.
std::size_t engines(const CudnnCalls& calls, const Descriptor& graph, const Descriptor& gpu) {
  const Descriptor heuristics = calls.make(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  calls.link(heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph.get());
  calls.set(heuristics, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_HEUR_MODE_A);
  calls.link(heuristics, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, gpu.get());
  calls.finish(heuristics, "searching for engines");
  return calls.fill(heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS, {});
}

TEST(CudnnLibrary, KnowsOurGraphAsAttention) {
  if (!cudnn_refusal().empty()) GTEST_SKIP() << cudnn_refusal();
  const CudnnCalls calls(cudnn());
  for (const AttentionShape& shape :
       {AttentionShape{2, 1024, 16, 4, 128}, AttentionShape{2, 1023, 16, 16, 64},
        AttentionShape{3, 37, 4, 2, 8}, AttentionShape{1, 2048, 8, 8, 256},
        AttentionShape{1, 1, 2, 2, 64}, AttentionShape{1, 65536, 32, 8, 128}}) {
    const OperationGraph graph = attention_graph(calls, shape, nullptr);
    for (const auto& [capability, shared] :
         {std::pair{800, 166912}, {890, 101376}, {900, 232448}}) {
      EXPECT_GE(engines(calls, graph.descriptor(), described_gpu(calls, capability, shared)), 1U)
          << shape.length << " tokens, heads of " << shape.head_dim << ", " << capability;
    }
  }
}

}  // namespace
}  // namespace ballast::model::cuda::cudnn_test
