// Tests ballast.product_algorithms, from the config to the products, on fakes of the GPU and of
// cuBLASLt.
#include <filesystem>
#include <string>

#include <gtest/gtest.h>

#include "ballast/calibrate/machine_files.h"

#include "tests/support/captured_log.h"
#include "tests/support/fake_cublaslt.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/tiny_training.h"
#include "tests/support/variable.h"

namespace ballast::engine::product_choice_test {
namespace {

using test::FakeCublasLt;

class ProductChoice : public testing::Test {
 protected:
  ProductChoice() {
    FakeCublasLt::milliseconds[0] = 2.0;
    FakeCublasLt::milliseconds[1] = 3.0;
    FakeCublasLt::milliseconds[2] = 1.0;
  }
  ~ProductChoice() override {
    for (auto& time : FakeCublasLt::milliseconds) time = 0.0;
  }

  /// A run and the products that it enqueued.
  struct Run {
    test::Outcome outcome;
    int products = 0;
  };
  Run train(const std::string& algorithms) {
    const std::string model = R"("family": "llama", "vocab_size": 131, "hidden_size": 32,
                                 "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
                                 "intermediate_size": 40)";
    const int before = FakeCublasLt::tried;
    Run run;
    run.outcome =
        test::train(test::tiny_config(model, true, directory_.path(),
                                      {"ballast.device=cuda", "train_micro_batch_size_per_gpu=1",
                                       "data.sequence_length=9", "ballast.eval_batches=1",
                                       "ballast.product_algorithms=" + algorithms}),
                    2, test::scattered_ids);
    run.products = FakeCublasLt::tried - before;
    return run;
  }

  test::TempDir directory_;
  test::Variable cache_ = {"XDG_CACHE_HOME", directory_.path().c_str()};
  std::filesystem::path file_ =
      calibrate::product_choices_file("Fake GPU; cuBLASLt " + std::to_string(CUBLAS_VERSION));
};

TEST_F(ProductChoice, ReachesTheProducts) {
  const Run heuristic = train("heuristic");
  EXPECT_EQ(FakeCublasLt::last_algorithm, 0);
  EXPECT_FALSE(std::filesystem::exists(file_));
  const test::CapturedLog log;
  const Run timed = train("timed");
  EXPECT_EQ(FakeCublasLt::last_algorithm, 2);
  EXPECT_TRUE(std::filesystem::exists(file_));
  EXPECT_GT(timed.products, heuristic.products);
  // The fake's algorithms have equal bits, so trials that change anything would be noticed.
  test::expect_same(timed.outcome, heuristic.outcome, "timed");
  EXPECT_EQ(log.text().find("products:"), std::string::npos) << log.text();
}

TEST_F(ProductChoice, IsTheSameInTheNextRun) {
  const Run heuristic = train("heuristic");
  train("timed");
  FakeCublasLt::milliseconds[2] = 4.0;
  const Run next = train("timed");
  EXPECT_EQ(FakeCublasLt::last_algorithm, 2);
  EXPECT_EQ(next.products, heuristic.products) << "nothing is timed again";
}

}  // namespace
}  // namespace ballast::engine::product_choice_test
