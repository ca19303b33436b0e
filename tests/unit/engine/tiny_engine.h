#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/engine/engine.h"

#include "tests/support/function_weights.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"

namespace ballast::test {

inline const std::string kTinyModel = R"("family": "llama", "vocab_size": 131, "hidden_size": 64,
                              "num_layers": 3, "num_heads": 4)";
inline const std::string kWeights = "zero_optimization.offload_param.device=";
inline const std::string kOptimizer = "zero_optimization.offload_optimizer.device=";

/// An engine of three layers and its batches.
class TinyEngine : public testing::Test {
 protected:
  [[nodiscard]] config::Config config(const std::vector<std::string>& overrides = {}) const {
    return test::tiny_config(kTinyModel, true, directory.path(), overrides);
  }
  [[nodiscard]] std::vector<std::int32_t> ids(const engine::Engine& engine, int seed) const {
    std::vector<std::int32_t> out(engine.blueprint().tokens_per_step());
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = static_cast<std::int32_t>((i * 31 + static_cast<std::size_t>(seed) * 17) % 131);
    }
    return out;
  }
  /// Starts the engine from a source. Its masters then equal the source's values, to the last bit.
  static void expect_all_of_a_source(engine::Engine& engine) {
    const auto value = [](const model::TensorSpec& tensor, Elems i) {
      return 1.0F / static_cast<float>(tensor.size + i);
    };
    start_from(engine, {[&](const model::TensorSpec& tensor, Elems first, std::span<float> out) {
                 ASSERT_LE(first + out.size(), tensor.size);
                 for (Elems i = 0; i < out.size(); ++i) out[i] = value(tensor, first + i);
               }});
    const auto& blocks = engine.blueprint().model.blocks;
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      for (const model::TensorSpec& tensor : blocks[b].tensors) {
        std::vector<float> expected(tensor.size);
        for (Elems i = 0; i < expected.size(); ++i) expected[i] = value(tensor, i);
        EXPECT_EQ(engine.snapshot().read_weights(b, tensor), expected) << tensor.name;
      }
    }
  }

  test::TempDir directory;
};

}  // namespace ballast::test
