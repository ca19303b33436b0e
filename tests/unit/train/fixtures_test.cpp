#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/train/loader.h"
#include "ballast/train/lr_schedule.h"
#include "ballast/train/safetensors.h"

namespace ballast::train {
namespace {

std::filesystem::path folder() {
  const char* const data = std::getenv("BALLAST_TEST_DATA");
  return std::filesystem::path(data == nullptr ? "tests/data" : data) / "training";
}

nlohmann::json load(const std::string& name) {
  std::ifstream file(folder() / (name + ".json"));
  return nlohmann::json::parse(file);
}

/// The readers read files that PyTorch wrote: see tests/data/make_training_fixtures.py.
class TrainingFixture : public testing::TestWithParam<std::string> {
 protected:
  const nlohmann::json recorded_ = load(GetParam());
};

TEST_P(TrainingFixture, RatesAreThoseOfTheSchedule) {
  const auto& from = recorded_["scheduler"];
  config::SchedulerSection section;
  section.type = config::SchedulerSection::Type::warmup;
  section.warmup_min_lr = from["warmup_min_lr"];
  section.warmup_max_lr = from["warmup_max_lr"].get<double>();
  section.warmup_num_steps = from["warmup_num_steps"];
  section.warmup_linear = from["warmup_type"] == "linear";
  const LrSchedule schedule(section, 1.0);
  const std::vector<double> rates = recorded_["lr"];
  ASSERT_EQ(rates.size(), 30U);
  for (std::size_t i = 0; i < rates.size(); ++i) {
    EXPECT_NEAR(schedule.at(i + 1), rates[i], 1e-15) << "step " << i + 1;
  }
}

TEST_P(TrainingFixture, TokensMakeExactlyTheRecordedSteps) {
  const auto& geometry = recorded_["batch"];
  const std::uint64_t steps = geometry["steps"];
  LoaderOptions options;
  options.micro_batches = geometry["micro_batches"];
  options.sequences = geometry["sequences"];
  options.length = geometry["sequence_length"];
  options.shuffle = false;
  config::DataSection data;
  data.tokens = {folder() / "tokens.u16.bin"};
  const auto source = std::make_shared<const TokenSource>(
      TokenSource::open(data, recorded_["model"]["vocab_size"].get<std::uint64_t>()));
  const auto per_step = options.micro_batches * options.sequences * options.length;
  ASSERT_EQ(source->size(), steps * per_step + 1);
  Loader loader(source, split_tokens(source->size(), 0.0, options.length), options);
  std::vector<std::int32_t> whole(source->size());
  source->read(0, whole);
  for (std::uint64_t step = 0; step < steps; ++step) {
    const auto batch = loader.next();
    const auto begin = whole.begin() + static_cast<std::ptrdiff_t>(step * per_step);
    const auto count = static_cast<std::ptrdiff_t>(per_step);
    EXPECT_TRUE(std::equal(batch.tokens.begin(), batch.tokens.end(), begin, begin + count));
    EXPECT_TRUE(
        std::equal(batch.targets.begin(), batch.targets.end(), begin + 1, begin + 1 + count));
  }
}

TEST_P(TrainingFixture, WeightsAreOneTensorForEveryGradient) {
  for (const std::string state : {".initial", ".final"}) {
    const SafetensorsReader reader(folder() / (GetParam() + state + ".safetensors"));
    const auto& norms = recorded_["runs"]["fp32"]["first_step_grad_norms"];
    EXPECT_EQ(reader.tensors().size(), norms.size());
    double sum = 0.0;
    for (const auto& tensor : reader.tensors()) {
      ASSERT_TRUE(norms.contains(tensor.name)) << tensor.name;
      sum += norms[tensor.name].get<double>() * norms[tensor.name].get<double>();
      std::vector<float> values(tensor.elements);
      reader.read(tensor.name, values);
      for (const float value : values) ASSERT_LT(std::abs(value), 2.0F) << tensor.name;
    }
    EXPECT_NEAR(std::sqrt(sum), recorded_["runs"]["fp32"]["grad_norm"][0].get<double>(), 1e-12);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, TrainingFixture, testing::Values("gpt2", "llama", "llama_tied"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace ballast::train
