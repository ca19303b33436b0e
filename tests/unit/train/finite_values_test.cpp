#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <regex>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/memory.h"
#include "ballast/train/trainer.h"

#include "src/train/initial_weights.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"

namespace ballast::train::finite_values_test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<std::byte> stored(const std::vector<float>& values, DType type) {
  std::vector<std::byte> bytes(values.size() * size_of(type));
  for (std::size_t i = 0; i < values.size(); ++i) {
    std::byte* const at = bytes.data() + i * size_of(type);
    const auto put = [at](auto value) { std::memcpy(at, &value, sizeof(value)); };
    if (type == DType::bf16) put(to_bf16(values[i]));
    if (type == DType::f16) put(to_f16(values[i]));
    if (type == DType::f32) put(values[i]);
  }
  return bytes;
}

TEST(FiniteValues, TheFirstThatIsNotFiniteIsFoundWhereverItIs) {
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    const float largest = type == DType::f16 ? 65504.0F : 0x1.fep127F;
    for (std::size_t count = 1; count < 12; ++count) {
      std::vector<float> values(count, -largest);
      EXPECT_FALSE(first_not_finite(stored(values, type), type));
      for (std::size_t i = count; i-- > 0;) {
        values[i] = i % 3 == 0 ? kNan : i % 3 == 1 ? kInf : -kInf;
        EXPECT_EQ(first_not_finite(stored(values, type), type), i) << count;
      }
    }
  }
}

struct Silent : Observer {
  void planned(const engine::Blueprint& /*blueprint*/, const std::string& /*device*/) override {}
  void started(const RunStart& /*start*/) override {}
  void stepped(const StepReport& /*report*/) override {}
  void finished(const RunSummary& /*summary*/) override {}
};

class DivergedModel : public testing::Test {
 protected:
  config::Config config(const std::string& run, std::vector<std::string> overrides) const {
    overrides.insert(overrides.begin(), {"data.held_out=0", "ballast.steps=1"});
    config::Config config = test::tiny_config(
        R"("vocab_size": 256, "hidden_size": 32, "num_layers": 1, "num_heads": 2)", true,
        directory_.path() / run, overrides);
    config.data.tokens.clear();
    config.data.text = {text_};
    return config;
  }
  static void run(const config::Config& config, const RunOptions& options = {}) {
    Silent silent;
    train(config, silent, nullptr, options);
  }
  /// Writes NaN to element 3 of a tensor of a safetensors file in F32.
  static void spoil(const std::filesystem::path& file, const std::string& tensor) {
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    std::uint64_t length = 0;
    stream.read(reinterpret_cast<char*>(&length), sizeof(length));
    std::string header(length, ' ');
    stream.read(header.data(), static_cast<std::streamsize>(length));
    std::smatch found;
    ASSERT_TRUE(std::regex_search(header, found,
                                  std::regex("\"" + tensor + R"("[^}]*"data_offsets":\[(\d+))")));
    stream.seekp(static_cast<std::streamoff>(sizeof(length) + length + std::stoull(found[1]) + 12));
    stream.write(reinterpret_cast<const char*>(&kNan), sizeof(kNan));
  }

  test::TempDir directory_;
  std::filesystem::path text_ = directory_.write("text.txt", std::string(3000, 'a') + "bcd");
};

TEST_F(DivergedModel, IsRefusedByItsTensorBeforeTheFirstStep) {
  run(config("first", {}));
  const std::filesystem::path weights = directory_.path() / "first/weights";
  spoil(weights / "model.safetensors", "transformer.h.0.ln_2.weight");
  for (const char* type : {"bf16.enabled=true", "bf16.enabled=false"}) {
    const auto again = config("next", {"model.weights=" + weights.string(), type});
    test::expect_error(ErrorCategory::data,
                       {"model.weights: ",
                        "model.safetensors: tensor 'transformer.h.0.ln_2.weight' has NaN at "
                        "element 3"},
                       [&] { run(again); });
    EXPECT_FALSE(std::filesystem::exists(directory_.path() / "next/metrics.jsonl"));
  }
}

TEST_F(DivergedModel, IsNotResumed) {
  // A rate that makes every weight infinite.
  const std::vector<std::string> overrides = {
      "ballast.checkpoint_every=1", "ballast.save_weights=false", "optimizer.params.lr=1e39"};
  run(config("run", overrides));
  config::Config more = config("run", overrides);
  more.ballast.steps = 2;
  test::expect_error(ErrorCategory::data, {"step-1: tensor 'transformer.", "which every loss"},
                     [&] { run(more, {.directory = RunDirectory::continued}); });
}

}  // namespace
}  // namespace ballast::train::finite_values_test
