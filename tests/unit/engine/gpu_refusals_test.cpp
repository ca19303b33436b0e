// Calls of CUDA and its libraries that fail, one at a time, during the whole life of an engine. The
// run then ends with one line, or has the same results as without the failure, and frees
// everything.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/core/random.h"
#include "ballast/engine/engine.h"
#include "ballast/setup/setup.h"

#include "tests/support/captured_log.h"
#include "tests/support/fake_cublaslt.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/fake_memory.h"
#include "tests/support/fake_stream.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/tiny_training.h"

namespace ballast::engine::gpu_refusals_test {
namespace {

using test::FakeCuda;

/// With BALLAST_TEST_REFUSALS=all, every call is refused once; otherwise some calls of each
/// function, which the fake's seed chooses.
std::set<int> refused_numbers(const std::string& call, int calls) {
  std::set<int> numbers;
  const char* const amount = std::getenv("BALLAST_TEST_REFUSALS");
  if (amount != nullptr && std::string(amount) == "all") {
    for (int i = 0; i < calls; ++i) numbers.insert(i);
    return numbers;
  }
  const std::uint64_t which = random_u64(FakeCuda::seed, std::hash<std::string>()(call));
  numbers.insert(static_cast<int>(which % static_cast<std::uint64_t>(calls)));
  numbers.insert(calls - 1);
  return numbers;
}

class GpuRefusals : public testing::Test {
 protected:
  [[nodiscard]] test::Outcome train() const {
    return test::train(
        test::tiny_config(
            R"("family": "llama", "vocab_size": 131, "hidden_size": 16, "num_layers": 1,
               "num_heads": 1, "intermediate_size": 16)",
            true, directory_.path(),
            {"ballast.device=cuda", "train_micro_batch_size_per_gpu=1", "data.sequence_length=4",
             "gradient_accumulation_steps=1", "ballast.eval_batches=1",
             R"(ballast.placement=[{"blocks": 0, "optimizer": "device"},
                                   {"blocks": "1-2", "optimizer": "cpu"}])"}),
        2, test::scattered_ids, nullptr, 2);
  }
  /// Trains and expects the usual results, or an error of one line.
  void expect_an_orderly_end(const test::Outcome& usual) const {
    try {
      test::expect_same(train(), usual, "the run went on");
    } catch (const Error& error) {
      const std::string text = error.what();
      EXPECT_EQ(text.find('\n'), std::string::npos) << text;
      EXPECT_TRUE(text.find("CUDA") != std::string::npos ||
                  text.find("cuBLASLt") != std::string::npos)
          << text;
      EXPECT_TRUE(error.category() == ErrorCategory::device ||
                  error.category() == ErrorCategory::memory)
          << text;
    } catch (const std::exception& error) {
      ADD_FAILURE() << "not an error of the program: " << error.what();
    }
  }
  static void expect_nothing_left() {
    EXPECT_EQ(FakeCuda::objects(), 0U) << "streams or events";
    EXPECT_EQ(test::FakeMemory::taken(), 0U) << "device memory";
    EXPECT_EQ(FakeCuda::host_allocations, 0);
    EXPECT_TRUE(FakeCuda::registered().empty());
    EXPECT_EQ(test::FakeCublasLt::alive, 0) << "objects of cuBLASLt";
    EXPECT_EQ(test::pending_work(), 0U);
  }

  test::TempDir directory_;
};

TEST_F(GpuRefusals, EndTheRunInOneLineOrNotAtAll) {
  const test::CapturedLog log;
  const test::Outcome usual = train();
  std::map<std::string, int> calls;
  {
    const FakeCuda::Refusal none;
    static_cast<void>(train());
    calls = none.calls();
  }
  expect_nothing_left();
  for (const char* const call : {"cudaMalloc", "cudaMallocHost", "cudaHostRegister",
                                 "cudaLaunchKernel", "cudaMemcpyAsync", "cublasLtMatmul"}) {
    EXPECT_TRUE(calls.contains(call)) << call << " is not tried";
  }
  for (const auto& [call, count] : calls) {
    for (const int number : refused_numbers(call, count)) {
      SCOPED_TRACE(call + ", number " + std::to_string(number));
      {
        const FakeCuda::Refusal refusal(call, number);
        expect_an_orderly_end(usual);
      }
      expect_nothing_left();
    }
  }
}

TEST_F(GpuRefusals, AFaultOfAKernelEndsTheRunInOneLine) {
  const test::CapturedLog log;
  const test::Outcome usual = train();
  FakeCuda::kernels_until_fault = 1 << 30;
  static_cast<void>(train());
  const int kernels = (1 << 30) - FakeCuda::kernels_until_fault;
  for (const int number : refused_numbers("kernel", kernels)) {
    SCOPED_TRACE(number);
    FakeCuda::kernels_until_fault = number;
    expect_an_orderly_end(usual);
    EXPECT_EQ(FakeCuda::fault, cudaErrorIllegalAddress);
    FakeCuda::kernels_until_fault = -1;
    FakeCuda::fault = cudaSuccess;
    expect_nothing_left();
  }
}

}  // namespace
}  // namespace ballast::engine::gpu_refusals_test
