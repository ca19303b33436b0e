#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/tiny_training.h"

// The invariant of the whole engine on the CUDA device: the tier of states, the device of their
// update (GPU or CPU) and the overlap of transfers do not change a single bit of the results.
// Without a GPU its kernels run thread by thread on the host, so models and runs are small.

namespace ballast::engine::invariance_on_cuda_test {
namespace {

#if defined(BALLAST_EMULATED_GPU)
constexpr std::uint64_t kSteps = 6;
#else
constexpr std::uint64_t kSteps = 10;
#endif

const std::string kGpt2 = R"("family": "gpt2", "vocab_size": 131, "hidden_size": 32,
                             "num_layers": 2, "num_heads": 2)";
const std::string kLlama = R"("family": "llama", "vocab_size": 131, "hidden_size": 48,
                              "num_layers": 2, "num_heads": 6, "num_kv_heads": 2,
                              "intermediate_size": 72)";

test::Outcome train(const std::string& model, bool bf16, bool packed,
                    std::vector<std::string> overrides) {
  const test::TempDir directory;
  if (packed) overrides.insert(overrides.begin(), test::kPacked);
  for (const char* common : {"train_micro_batch_size_per_gpu=1", "data.sequence_length=19"}) {
    overrides.emplace_back(common);
  }
  return test::train(test::tiny_config(model, bf16, directory.path(), overrides), kSteps,
                     test::scattered_ids);
}

void expect_invariance(const std::string& model, bool bf16, bool packed = false) {
  const std::string optimizer = "zero_optimization.offload_optimizer.device=";
  const std::string weights = "zero_optimization.offload_param.device=";
  const test::Outcome expected =
      train(model, bf16, packed, {"ballast.serial=true", "ballast.recompute=true"});
  EXPECT_LT(expected.losses.back(), expected.losses.front()) << "nothing was learnt";
  const std::vector<std::vector<std::string>> variants = {
      {},
      {optimizer + "cpu", "ballast.recompute=false"},
      {weights + "cpu", optimizer + "cpu", "ballast.update_threads=3"},
      {weights + "nvme", optimizer + "nvme", "ballast.activations=nvme", "ballast.delay_seed=3"},
      {weights + "cpu",
       R"(ballast.placement=[{"blocks": "0-1", "weights": "nvme", "optimizer": "device"},
                             {"blocks": 2, "weights": "device", "optimizer": "cpu"}])"},
      {"ballast.order=micro_batch_major", weights + "cpu", "ballast.activations=cpu",
       R"(ballast.placement=[{"blocks": 2, "recompute": true}])"}};
  for (const auto& variant : variants) {
    std::string name;
    for (const std::string& part : variant) name += part + " ";
    test::expect_same(train(model, bf16, packed, variant), expected, name);
  }
}

TEST(InvarianceOnCuda, Gpt2WithACutVocabularyInBf16) {
  expect_invariance(kGpt2 + R"(, "vocabulary_tiles": 3)", true);
}
TEST(InvarianceOnCuda, LlamaInFp16WithSkippedSteps) {
  const auto run = [](std::vector<std::string> overrides) {
    overrides.insert(overrides.begin(), test::kFp16.begin(), test::kFp16.end());
    return train(kLlama, false, false, overrides);
  };
  const test::Outcome expected = run({"ballast.recompute=true"});
  EXPECT_GT(test::skipped_steps(expected), 0);
  EXPECT_LT(expected.losses.back(), expected.losses.front()) << "nothing was learnt";
  test::expect_same(
      run({"zero_optimization.offload_optimizer.device=nvme",
           "zero_optimization.offload_param.device=cpu", "ballast.speculative_updates=9"}),
      expected, "updates on the host");
}
TEST(InvarianceOnCuda, LlamaInBf16) {
  expect_invariance(kLlama, true);
}
TEST(InvarianceOnCuda, PackedLlamaInTilesInFp32) {
  expect_invariance(kLlama + R"(, "vocabulary_tiles": 2, "layer_tiles": 2)", false, true);
}

}  // namespace
}  // namespace ballast::engine::invariance_on_cuda_test
