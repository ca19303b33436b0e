// ballast.kernels and ballast.gpu_checks, from the config to the kernels, on fakes of the GPU and
// of cuBLASLt.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/engine/run_states.h"
#include "ballast/model/compute.h"
#include "ballast/setup/setup.h"
#include "ballast/setup/translate.h"

#include "tests/support/captured_log.h"
#include "tests/support/expect_error.h"
#include "tests/support/fake_cublaslt.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/tiny_training.h"

namespace ballast::engine::kernel_choice_test {
namespace {

using test::FakeCublasLt;
using test::FakeCuda;

class KernelChoice : public testing::Test {
 protected:
  ~KernelChoice() override {
    FakeCuda::missing_library.clear();
    FakeCuda::kernels_until_fault = -1;
    FakeCuda::fault = cudaSuccess;
  }

  config::Config config(std::vector<std::string> overrides) const {
    for (const char* common : {"ballast.device=cuda", "train_micro_batch_size_per_gpu=1",
                               "data.sequence_length=9", "ballast.eval_batches=1"}) {
      overrides.insert(overrides.begin(), common);
    }
    const std::string model = R"("family": "llama", "vocab_size": 131, "hidden_size": 32,
                                 "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
                                 "intermediate_size": 40)";
    return test::tiny_config(model, true, directory_.path(), overrides);
  }
  test::Outcome train(const std::vector<std::string>& overrides) const {
    return test::train(config(overrides), 2, test::scattered_ids);
  }

  test::TempDir directory_;
};

TEST_F(KernelChoice, PlainKernelsTrainWithoutAnyLibrary) {
  const test::Outcome usual = train({});
  const int before = FakeCublasLt::tried;
  FakeCuda::missing_library = "a test has none";
  const test::Outcome plain = train({"ballast.kernels=plain"});
  EXPECT_EQ(FakeCublasLt::tried, before);
  EXPECT_NE(plain.losses, usual.losses) << "sums have another order";
  for (std::size_t i = 0; i < usual.losses.size(); ++i) {
    EXPECT_NEAR(plain.losses[i], usual.losses[i], 1e-3);
    EXPECT_NEAR(plain.norms[i], usual.norms[i], 2e-2 * usual.norms[i]);
  }
  test::expect_same(train({"ballast.kernels=plain", "ballast.serial=true",
                           "zero_optimization.offload_optimizer.device=cpu",
                           "zero_optimization.offload_param.device=cpu", "ballast.activations=cpu",
                           "ballast.recompute=true"}),
                    plain, "on the host");
  const Engine engine = setup::make_engine(config({"ballast.kernels=plain"}));
  EXPECT_TRUE(engine.arithmetic().ends_with(", plain kernels")) << engine.arithmetic();
}

TEST_F(KernelChoice, PlainKernelsExcludeCudnn) {
  const std::string text = test::error_of(ErrorCategory::config, [&] {
    static_cast<void>(config({"ballast.kernels=plain", "ballast.attention=cudnn"}));
  });
  EXPECT_NE(text.find("ballast.attention"), std::string::npos) << text;
  EXPECT_NE(text.find("\"plain\" uses no library"), std::string::npos) << text;
}

TEST_F(KernelChoice, HasNoEffectOnTheHostDeviceAndSaysSo) {
  const auto log_of = [&](const std::string& setting) {
    const test::CapturedLog log;
    setup::check_device(config({"ballast.device=host", setting}));
    return log.text();
  };
  for (const char* setting : {"ballast.kernels=plain", "ballast.gpu_checks=each"}) {
    EXPECT_NE(log_of(setting).find("have no effect"), std::string::npos) << log_of(setting);
  }
  EXPECT_EQ(log_of("ballast.kernels=auto"), "");
}

TEST_F(KernelChoice, ChecksChangeNoBits) {
  test::expect_same(train({"ballast.gpu_checks=each"}), train({}), "checked");
}

TEST_F(KernelChoice, ChecksNameTheKernelThatFails) {
  const auto error_with = [&](const std::string& checks) {
    Engine engine = setup::make_engine(config({"ballast.gpu_checks=" + checks}));
    engine.start();
    const std::size_t tokens = engine.blueprint().problem.tokens_per_step();
    FakeCuda::kernels_until_fault = 6;
    const std::string text = test::error_of(ErrorCategory::device, [&] {
      engine.train_step(test::scattered_ids(tokens, 1).view(), 1e-3);
    });
    FakeCuda::kernels_until_fault = -1;
    FakeCuda::fault = cudaSuccess;
    return text;
  };
  const std::string named = error_with("each");
  EXPECT_TRUE(named.starts_with("forward of layer 0, micro-batch 0: norm [9, 32]: ")) << named;
  EXPECT_EQ(named.find("repeat"), std::string::npos) << named;
  const std::string blamed = error_with("off");
  EXPECT_TRUE(blamed.ends_with("to find it, repeat with ballast.gpu_checks=each")) << blamed;
}

/// Seeded weights, one of which is a NaN.
class SpoiledWeights final : public WeightSource {
 public:
  explicit SpoiledWeights(std::string tensor) : tensor_(std::move(tensor)) {}
  void read(const model::TensorSpec& tensor, Elems first, std::span<float> out) override {
    model::initialize(tensor, 7, first, out);
    if (tensor.name == tensor_ && first == 0) out[0] = std::numeric_limits<float>::quiet_NaN();
  }

 private:
  std::string tensor_;
};

TEST_F(KernelChoice, ChecksNameTheFirstOperationWhoseResultIsNotFinite) {
  const std::string text = test::error_of(ErrorCategory::numeric, [&] {
    Engine engine = setup::make_engine(config({"ballast.gpu_checks=each"}));
    SpoiledWeights source("model.layers.1.mlp.down_proj.weight");
    engine.start(source);
    const std::size_t tokens = engine.blueprint().problem.tokens_per_step();
    engine.train_step(test::scattered_ids(tokens, 1).view(), 1e-3);
  });
  EXPECT_EQ(text,
            "forward of layer 1, micro-batch 0: 9 of 288 values of its output are not finite; the "
            "first, nan, is in row 0, column 0");
}

}  // namespace
}  // namespace ballast::engine::kernel_choice_test
