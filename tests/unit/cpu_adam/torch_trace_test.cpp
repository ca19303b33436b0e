#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include <gtest/gtest.h>

#include "states.h"

namespace ballast::cpu_adam {
namespace {

using test::ulp;

struct Step {
  double learning_rate = 0.0;
  std::vector<float> gradient, weight, first, second;
};

struct Case {
  AdamW hyper;
  std::vector<float> start;
  std::vector<Step> steps;
};

/// Reads tests/data/adamw_trace.bin; its layout is described in make_adamw_trace.py.
class TraceReader {
 public:
  explicit TraceReader(const std::filesystem::path& path) : file_(path, std::ios::binary) {}

  std::vector<Case> read() {
    std::vector<Case> cases(number<std::uint32_t>());
    for (Case& one : cases) {
      const auto elements = number<std::uint32_t>();
      one.steps.resize(number<std::uint32_t>());
      one.hyper.beta1 = number<double>();
      one.hyper.beta2 = number<double>();
      one.hyper.epsilon = number<double>();
      one.hyper.weight_decay = number<double>();
      one.hyper.gradient_scale = static_cast<float>(number<double>());
      one.start = floats(elements);
      for (Step& step : one.steps) {
        step.learning_rate = number<double>();
        step.gradient = floats(elements);
        step.weight = floats(elements);
        step.first = floats(elements);
        step.second = floats(elements);
      }
    }
    return file_ ? cases : std::vector<Case>{};
  }

 private:
  template <class T>
  T number() {
    T value{};
    file_.read(reinterpret_cast<char*>(&value), sizeof value);
    return file_ ? value : T{};
  }
  std::vector<float> floats(std::size_t count) {
    std::vector<float> values(count);
    file_.read(reinterpret_cast<char*>(values.data()),
               static_cast<std::streamsize>(count * sizeof(float)));
    return values;
  }

  std::ifstream file_;
};

/// The largest distance of a weight, in ulps of the largest that the weight has been so far, and
/// the number of moments that are not equal bit for bit.
struct Distances {
  double weight = 0.0;
  int moments = 0;
};

class TorchTrace : public testing::Test {
 protected:
  void SetUp() override {
    const char* folder = std::getenv("BALLAST_TEST_DATA");
    ASSERT_NE(folder, nullptr) << "set BALLAST_TEST_DATA to tests/data (meson test does)";
    cases_ = TraceReader(std::filesystem::path(folder) / "adamw_trace.bin").read();
    ASSERT_EQ(cases_.size(), 2U);
    for (const Case& one : cases_) ASSERT_GE(one.steps.size(), 20U);
  }

  /// Steps through `one`; each step starts from torch's weights when `follow`, else from our own.
  static Distances run(const Case& one, Isa isa, bool follow) {
    const Updater updater(1, isa);
    AdamW hyper = one.hyper;
    std::vector<float> weight = one.start;
    std::vector<float> first(weight.size(), 0.0F);
    std::vector<float> second(weight.size(), 0.0F);
    std::vector<float> largest(weight.size(), 0.0F);
    Distances result;
    for (const Step& step : one.steps) {
      for (std::size_t i = 0; i < weight.size(); ++i) {
        const float before = std::fabs(weight[i]);
        largest[i] = follow ? before : std::max(largest[i], before);
      }
      hyper.step = &step - one.steps.data() + 1;
      hyper.learning_rate = step.learning_rate;
      updater.step(hyper, PlainShard{weight.data(), first.data(), second.data(),
                                     step.gradient.data(), weight.size()});
      for (std::size_t i = 0; i < weight.size(); ++i) {
        const double off = std::fabs(double{weight[i]} - double{step.weight[i]});
        const float scale = std::max(largest[i], std::fabs(step.weight[i]));
        result.weight = std::max(result.weight, off / ulp(scale));
        result.moments += first[i] != step.first[i] || second[i] != step.second[i] ? 1 : 0;
      }
      if (follow) weight = step.weight;
    }
    return result;
  }

  std::vector<Case> cases_;
};

// Torch takes the square root from MKL, which is off by up to 0.7 ulp where ours is rounded to
// nearest; all other operations round alike.
TEST_F(TorchTrace, MomentsAreEqualAndEachStepFromTorchsWeightsEndsWithinOneUlp) {
  for (const Isa isa : available()) {
    for (const Case& one : cases_) {
      const Distances distances = run(one, isa, true);
      EXPECT_LE(distances.weight, 1.0) << to_string(isa);
      EXPECT_EQ(distances.moments, 0) << to_string(isa);
    }
  }
}

TEST_F(TorchTrace, AllStepsFromOurOwnWeightsStayWithinTwoUlps) {
  for (const Isa isa : available()) {
    for (const Case& one : cases_) {
      const Distances distances = run(one, isa, false);
      EXPECT_LE(distances.weight, 2.0) << to_string(isa);
    }
  }
}

}  // namespace
}  // namespace ballast::cpu_adam
