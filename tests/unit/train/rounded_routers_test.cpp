#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/setup/setup.h"

#include "src/train/initial_weights.h"
#include "src/train/saved_weights.h"
#include "tests/support/captured_log.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"

namespace ballast::train::rounded_routers_test {
namespace {

const std::string kModel =
    R"("family": "minimax_m2", "vocab_size": 131, "hidden_size": 16, "num_layers": 2,
       "num_heads": 2, "intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2)";

/// Log of a start with the weights of an fp32 run.
std::string log_of_start(bool bf16) {
  const test::TempDir directory;
  const config::Config first = test::tiny_config(kModel, false, directory.path() / "first", {});
  engine::Engine from = setup::make_engine(first);
  from.start();
  save_weights(from, first, true, [](Bytes, Bytes) {});
  const std::string weights = (directory.path() / "first/weights").string();
  const config::Config config =
      test::tiny_config(kModel, bf16, directory.path() / "second",
                        {"model.weights=" + weights, R"(ballast.train=["model.norm.weight"])"});
  engine::Engine engine = setup::make_engine(config);
  const test::CapturedLog log;
  start_from_weights(engine, config, [](Bytes, Bytes) {});
  return log.text();
}

TEST(RoundedRouters, AreNamedAtTheStart) {
  const std::string text = log_of_start(true);
  EXPECT_NE(text.find("model.weights: 2 of 2 router weights, such as "
                      "model.layers.0.block_sparse_moe.gate.weight, have values that bf16 rounds"),
            std::string::npos)
      << text;
  EXPECT_EQ(log_of_start(false).find("router weights"), std::string::npos);
}

}  // namespace
}  // namespace ballast::train::rounded_routers_test
