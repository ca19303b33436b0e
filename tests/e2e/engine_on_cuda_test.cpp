#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include <dlfcn.h>
#include <gtest/gtest.h>

#include "ballast/calibrate/machine_files.h"
#include "ballast/core/error.h"
#include "ballast/engine/engine.h"
#include "ballast/setup/setup.h"

#include "tests/support/fake_cublaslt.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/tiny_training.h"
#include "tests/support/variable.h"

// Failures of the engine on the CUDA device: on a GPU or, without one, on fakes.

namespace ballast::engine::engine_on_cuda_test {
namespace {

using test::FakeCublasLt;
using test::FakeCuda;

class EngineOnCuda : public testing::Test {
 protected:
  /// A run in its own directory.
  Engine make(const std::string& more = "ballast.serial=false") {
    return setup::make_engine(
        test::tiny_config(R"("family": "gpt2", "vocab_size": 131, "hidden_size": 32,
                                       "num_layers": 2, "num_heads": 2)",
                          true, directory_.path(),
                          {"train_micro_batch_size_per_gpu=1", "data.sequence_length=19",
                           "zero_optimization.offload_optimizer.device=cpu", more}));
  }
  static test::Batch batch_for(const Engine& engine) {
    return test::scattered_ids(engine.blueprint().tokens_per_step(), 1);
  }

  test::TempDir directory_;
};

TEST_F(EngineOnCuda, SearchesForProductsBeforeTheFirstStep) {
  Engine engine = make();
  const int before = FakeCublasLt::searches;
  engine.start();
  const int at_start = FakeCublasLt::searches;
  EXPECT_GT(at_start, before);
  const test::Batch batch = batch_for(engine);
  engine.train_step({batch.tokens, batch.targets}, 0.001);
  const std::size_t held_out =
      engine.evaluation_micro_batches() * engine.blueprint().shape.tokens();
  const test::Batch evaluated = test::scattered_ids(held_out, 2);
  engine.evaluate({evaluated.tokens, evaluated.targets}).loss;
  engine.finish();
  EXPECT_EQ(FakeCublasLt::searches, at_start) << "a lane had to wait for what the start left out";
}

/// The content of a file; "" if there is none.
std::string content_of(const std::filesystem::path& file) {
  std::ostringstream content;
  content << std::ifstream(file).rdbuf();
  return content.str();
}

/// With timed products and experts, whose numbers of rows differ in each step.
TEST_F(EngineOnCuda, StepsAllocateNothingAndTimeNothing) {
  const test::Variable cache("XDG_CACHE_HOME", directory_.path().c_str());
  FakeCublasLt::milliseconds[0] = 2.0;
  FakeCublasLt::milliseconds[1] = 1.0;
  FakeCublasLt::milliseconds[2] = 3.0;
  Engine engine = setup::make_engine(test::tiny_config(
      R"("family": "mixtral", "vocab_size": 131, "hidden_size": 32, "num_layers": 2,
         "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 24, "num_local_experts": 3,
         "num_experts_per_tok": 2)",
      true, directory_.path(),
      {"train_micro_batch_size_per_gpu=1", "data.sequence_length=39",
       "gradient_accumulation_steps=9", "ballast.product_algorithms=timed"}));
  engine.start();
  const std::filesystem::path file =
      calibrate::product_choices_file("Fake GPU; cuBLASLt " + std::to_string(CUBLAS_VERSION));
  const std::string choices = content_of(file);
  EXPECT_NE(choices, "");
  EXPECT_EQ(FakeCublasLt::last_algorithm, 1);
  const int searches = FakeCublasLt::searches;
  const int refused = FakeCuda::NoAllocation::refused;
  {
    const FakeCuda::NoAllocation in_steps;
    for (std::uint64_t step = 1; step <= 2; ++step) {
      const test::Batch batch = test::scattered_ids(engine.blueprint().tokens_per_step(), step);
      engine.train_step({batch.tokens, batch.targets}, 0.001);
    }
    engine.finish();
  }
  for (auto& time : FakeCublasLt::milliseconds) time = 0.0;
  EXPECT_EQ(FakeCuda::NoAllocation::refused, refused);
  EXPECT_GT(FakeCublasLt::searches, searches) << "no new shape to test with";
  EXPECT_EQ(content_of(file), choices) << "a step timed products";
}

TEST_F(EngineOnCuda, EveryOperationIsARangeOfTheProfilerIfAskedFor) {
  const char* const path = std::getenv("NVTX_INJECTION64_PATH");
  if (path == nullptr) GTEST_SKIP() << "built without NVTX";
  void* const profiler = dlopen(path, RTLD_NOW);
  ASSERT_NE(profiler, nullptr) << dlerror();
  const auto ranges =
      reinterpret_cast<int (*)(const char*)>(dlsym(profiler, "fake_profiler_ranges"));
  ASSERT_NE(ranges, nullptr);
  const auto train = [this](Engine engine) {
    engine.start();
    const test::Batch batch = batch_for(engine);
    const StepResult result = engine.train_step({batch.tokens, batch.targets}, 0.001);
    engine.finish();
    return result.loss;
  };
  const double loss = train(make());
  EXPECT_EQ(ranges(""), 0);
  EXPECT_EQ(train(make("ballast.nvtx=true")), loss);
  EXPECT_GT(ranges("forward of layer 1"), 0);
  EXPECT_GT(ranges("update of layer 0"), 0);
}

TEST_F(EngineOnCuda, MissingLibrariesAreReportedAtTheStart) {
  Engine engine = make();
  FakeCublasLt::next_search = CUBLAS_STATUS_NOT_SUPPORTED;
  try {
    engine.start();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::device);
    EXPECT_NE(std::string(error.what()).find("forward of layer 0"), std::string::npos)
        << error.what();
  }
}

TEST_F(EngineOnCuda, ATokenOutsideTheVocabularyEndsTheStepWithItsName) {
  for (const bool target : {false, true}) {
    Engine engine = make();
    engine.start();
    test::Batch batch = batch_for(engine);
    (target ? batch.targets : batch.tokens)[23] = 131;
    try {
      engine.train_step({batch.tokens, batch.targets}, 0.001);
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.category(), ErrorCategory::data);
      const std::string message = error.what();
      // The fifth token of the second micro-batch.
      EXPECT_NE(message.find("token 4 of the micro-batch is 131, but model.vocab_size is 131"),
                std::string::npos)
          << message;
      EXPECT_EQ(message.rfind(target ? "forward and backward of head, micro-batch 1"
                                     : "forward of embedding, micro-batch 1",
                              0),
                0U)
          << message;
    }
  }
}

}  // namespace
}  // namespace ballast::engine::engine_on_cuda_test
