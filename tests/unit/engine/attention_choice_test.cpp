// ballast.attention, from the config to the kernels, on fakes of the GPU and of cuDNN.
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"

#include "tests/support/captured_log.h"
#include "tests/support/fake_cudnn.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/tiny_training.h"

namespace ballast::engine::attention_choice_test {
namespace {

using test::FakeCudnn;

class AttentionChoice : public testing::Test {
 protected:
  AttentionChoice() {
    FakeCudnn::reset();
    FakeCudnn::present = true;
  }
  ~AttentionChoice() override {
    EXPECT_EQ(FakeCudnn::alive, 0);
    FakeCudnn::reset();
  }
};

test::Outcome train(std::vector<std::string> overrides) {
  const test::TempDir directory;
  for (const char* common : {"ballast.device=cuda", "train_micro_batch_size_per_gpu=1",
                             "data.sequence_length=9", "ballast.eval_batches=1"}) {
    overrides.emplace_back(common);
  }
  const std::string model = R"("family": "llama", "vocab_size": 131, "hidden_size": 32,
                               "num_layers": 1, "num_heads": 4, "num_kv_heads": 2,
                               "intermediate_size": 40)";
  return test::train(test::tiny_config(model, true, directory.path(), overrides), 2,
                     test::scattered_ids);
}

TEST_F(AttentionChoice, ReachesTheKernels) {
  const test::Outcome own = train({"ballast.attention=own"});
  EXPECT_EQ(FakeCudnn::plans, 0);
  const test::Outcome cudnn = train({"ballast.attention=cudnn"});
  EXPECT_EQ(FakeCudnn::plans, 1);
  EXPECT_GT(FakeCudnn::executions, 2);
  EXPECT_NE(cudnn.losses, own.losses) << "probabilities are rounded elsewhere";
  for (std::size_t i = 0; i < own.losses.size(); ++i) {
    EXPECT_NEAR(cudnn.losses[i], own.losses[i], 1e-3);
  }
  test::expect_same(train({}), cudnn, "auto takes cuDNN");
}

TEST_F(AttentionChoice, PlacementsGiveTheSameBitsWithCudnn) {
  const test::Outcome expected = train({"ballast.serial=true"});
  test::expect_same(
      train({"zero_optimization.offload_optimizer.device=cpu",
             "zero_optimization.offload_param.device=cpu", "ballast.activations=cpu"}),
      expected, "on the host");
  EXPECT_EQ(FakeCudnn::plans, 2);
}

TEST_F(AttentionChoice, WithoutCudnnOwnKernelsRunUnlessItWasRequested) {
  const test::Outcome own = train({"ballast.attention=own"});
  FakeCudnn::present = false;
  {
    const test::CapturedLog log;
    test::expect_same(train({}), own, "auto");
    const std::string line =
        "attention: using Ballast's kernels, because libcudnn.so.9 cannot be loaded: a test has "
        "none\n";
    const auto at = log.text().find(line);
    EXPECT_NE(at, std::string::npos) << log.text();
    EXPECT_EQ(log.text().find(line, at + 1), std::string::npos) << log.text();
  }
  try {
    train({"ballast.attention=cudnn"});
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "ballast.attention is \"cudnn\", but libcudnn.so.9 cannot be loaded: a test has "
                 "none");
  }
}

/// The error of a run.
std::string error_of(const std::vector<std::string>& overrides) {
  try {
    train(overrides);
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::device);
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

TEST_F(AttentionChoice, OwnKernelsRunIfTheFirstExecutionFails) {
  const test::Outcome own = train({"ballast.attention=own"});
  FakeCudnn::executions_left = 0;
  {
    const test::CapturedLog log;
    test::expect_same(train({}), own, "auto");
    EXPECT_EQ(FakeCudnn::executions, 0);
    EXPECT_EQ(FakeCudnn::plans, 1);
    const std::string line = "attention: using Ballast's kernels, because ";
    const auto at = log.text().find(line);
    ASSERT_NE(at, std::string::npos) << log.text();
    EXPECT_NE(log.text().find("CUDNN_STATUS_EXECUTION_FAILED", at), std::string::npos)
        << log.text();
    EXPECT_EQ(log.text().find(line, at + 1), std::string::npos) << log.text();
    EXPECT_NE(log.text().find(", attention by Ballast\n"), std::string::npos) << log.text();
  }
  FakeCudnn::executions_left = 0;
  const std::string text = error_of({"ballast.attention=cudnn"});
  EXPECT_NE(text.find("CUDNN_STATUS_EXECUTION_FAILED"), std::string::npos) << text;
}

TEST_F(AttentionChoice, ALaterFailureEndsTheRun) {
  FakeCudnn::executions_left = 1;
  const std::string text = error_of({});
  EXPECT_NE(text.find("CUDNN_STATUS_EXECUTION_FAILED"), std::string::npos) << text;
  EXPECT_EQ(FakeCudnn::executions, 1);
}

}  // namespace
}  // namespace ballast::engine::attention_choice_test
