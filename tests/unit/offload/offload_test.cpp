#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <unistd.h>

#include "ballast/core/error.h"
#include "ballast/core/random.h"
#include "ballast/cpu_adam/optimizer.h"
#include "ballast/cpu_adam/updater.h"

#include "src/offload/optimizer.h"
#include "src/offload/states.h"

namespace ballast::offload {
namespace {

using cpu_adam::Gradient;
using cpu_adam::Moments;
using cpu_adam::Optimizer;

constexpr Elems kTiny = 1024;

/// Parameters of several types and sizes, with weights and gradients.
struct Model {
  std::vector<Parameter> parameters = {{3000, DType::bf16},
                                       {1, DType::f32},
                                       {700, DType::f16},
                                       {256, DType::f32},
                                       {5000, DType::f32}};
  std::vector<std::vector<float>> weights;  // memory of any type
  std::vector<std::vector<float>> gradients;

  Model() {
    float value = 0.0F;
    for (const Parameter& parameter : parameters) {
      std::vector<float> gradient;
      for (Elems i = 0; i < parameter.elements; ++i) {
        value += 0.37F;
        gradient.push_back(std::sin(value) * std::exp2(std::fmod(value, 20.0F) - 10.0F));
      }
      gradients.push_back(gradient);
      weights.emplace_back(parameter.elements);
    }
  }

  std::vector<ParameterUpdate> updates(std::int64_t step, Optimizer optimizer) {
    std::vector<ParameterUpdate> all;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      all.push_back({i,
                     weights[i].data(),
                     Gradient(gradients[i].data()),
                     {.optimizer = optimizer,
                      .weight_decay = 0.1,
                      .step = step,
                      .gradient_scale = static_cast<float>(step)}});
    }
    return all;
  }
};

std::vector<FiledParameter> filed(OffloadedOptimizer& states, Model& model) {
  std::vector<FiledParameter> all;
  for (std::size_t i = 0; i < model.parameters.size(); ++i) {
    all.push_back({"layer." + std::to_string(i), &states, i, model.weights[i].data()});
  }
  return all;
}

/// The fp32 states of all parameters.
std::vector<std::vector<float>> values_of(OffloadedOptimizer& states, Model& model) {
  std::vector<std::vector<float>> all;
  for (std::size_t i = 0; i < model.parameters.size(); ++i) {
    std::vector<float> master(model.parameters[i].elements), first(master), second(master);
    read_values(states, i, model.weights[i].data(), {master, first, second});
    all.insert(all.end(), {master, first, second});
  }
  return all;
}

class Offload : public testing::TestWithParam<Moments::Format> {
 protected:
  Offload() { std::filesystem::create_directories(folder_); }
  ~Offload() override { std::filesystem::remove_all(folder_); }

  OffloadedOptimizer make(Model& model, const StatePlace& place, Elems largest = kTiny,
                          Optimizer optimizer = Optimizer::adamw) const {
    return {OffloadLayout(optimizer, GetParam(), model.parameters, largest), place, 2};
  }
  StatePlace on_nvme(std::optional<Bytes> host = std::nullopt) const {
    return {state::SwapOptions{.paths = {{.directory = folder_}}, .any_file_system = true}, host};
  }

  std::filesystem::path folder_ =
      std::filesystem::path(testing::TempDir()) / ("offload-" + std::to_string(getpid()));
};

TEST_P(Offload, PlacesAndSubGroupsHaveTheSameBits) {
  for (const cpu_adam::OptimizerRow& row : cpu_adam::kOptimizers) {
    const Optimizer optimizer = row.type;
    // Some sub-groups stay in memory.
    const Bytes most =
        OffloadLayout(optimizer, GetParam(), Model().parameters, 256).bytes() * 9 / 10;
    std::vector<std::vector<float>> expected_states, expected_weights;
    const std::vector<std::pair<StatePlace, Elems>> ways = {{{}, Elems{1} << 20U},
                                                            {{}, kTiny},
                                                            {on_nvme(), kTiny},
                                                            {on_nvme(), 256},
                                                            {on_nvme(most), 256}};
    for (const auto& [place, largest] : ways) {
      Model model;
      OffloadedOptimizer states = make(model, place, largest, optimizer);
      for (int step = 1; step <= 4; ++step) {
        states.begin(model.updates(step, optimizer));
        states.wait(2);
        states.finish();
      }
      EXPECT_EQ(place.nvme.has_value(), states.homes().nvme_bytes() > 0);
      const auto values = values_of(states, model);
      if (expected_states.empty()) {
        expected_states = values;
        expected_weights = model.weights;
      }
      EXPECT_EQ(values, expected_states);
      EXPECT_EQ(model.weights, expected_weights);
    }
  }
}

TEST_P(Offload, SavedStatesContinueWithTheSameBits) {
  Model model;
  OffloadedOptimizer states = make(model, {});
  for (int step = 1; step <= 3; ++step) states.begin(model.updates(step, Optimizer::adamw));
  states.finish();
  const auto file = folder_ / "states.safetensors";
  save_states(filed(states, model), file, {{"note", "kept"}});

  Model other;
  other.weights[1] = model.weights[1];  // fp32 weights belong to the caller
  other.weights[3] = model.weights[3];
  other.weights[4] = model.weights[4];
  OffloadedOptimizer again = make(other, on_nvme(), 256);
  EXPECT_EQ(read_notes(file).at("note"), "kept");
  load_states(filed(again, other), file);
  EXPECT_EQ(other.weights, model.weights);
  EXPECT_EQ(values_of(again, other), values_of(states, model));
  states.begin(model.updates(4, Optimizer::adamw));
  again.begin(other.updates(4, Optimizer::adamw));
  EXPECT_EQ(values_of(again, other), values_of(states, model));
  EXPECT_EQ(other.weights, model.weights);
}

TEST_P(Offload, RefusesStatesOfOthersAndDamagedFiles) {
  Model model;
  OffloadedOptimizer states = make(model, {});
  states.begin(model.updates(1, Optimizer::adamw));
  states.finish();
  const auto file = folder_ / "states.safetensors";
  save_states(filed(states, model), file, {});
  const auto before = values_of(states, model);
  OffloadedOptimizer lion = make(model, {}, kTiny, Optimizer::lion);
  EXPECT_THROW(load_states(filed(lion, model), file), Error);
  // Flips a bit in the values of any parameter, in the checksums, in the notes.
  const auto size = static_cast<std::streamoff>(std::filesystem::file_size(file));
  for (const std::streamoff place : {size - 1, size - 4000, size / 2, std::streamoff{4200}}) {
    const auto flip = [&] {
      std::fstream bytes(file, std::ios::in | std::ios::out | std::ios::binary);
      bytes.seekg(place);
      const auto byte = static_cast<char>(bytes.get() ^ 0x10);
      bytes.seekp(place);
      bytes.put(byte);
    };
    flip();
    EXPECT_THROW(load_states(filed(states, model), file), Error) << place;
    flip();
  }
  std::filesystem::resize_file(file, std::filesystem::file_size(file) - 1);
  EXPECT_THROW(load_states(filed(states, model), file), Error);
  EXPECT_EQ(values_of(states, model), before);
  EXPECT_THROW(make(model, on_nvme(1)), Error);
}

TEST_P(Offload, AddedParametersLeaveTheOthersWhereTheyAre) {
  std::vector<std::vector<float>> expected;
  for (const StatePlace& place : {StatePlace{}, on_nvme(), on_nvme(Bytes{1} << 20U)}) {
    Model model;
    const std::vector<Parameter> early(model.parameters.begin(), model.parameters.begin() + 3);
    OffloadedOptimizer states(OffloadLayout(Optimizer::adamw, GetParam(), early, 256), place, 2);
    for (int step = 1; step <= 4; ++step) {
      if (step == 3) {
        EXPECT_EQ(states.add({model.parameters[3], model.parameters[4]}), 3U);
      }
      auto updates = model.updates(step, Optimizer::adamw);
      while (updates.size() > states.layout().parameters().size()) updates.pop_back();
      states.begin(updates);
      states.finish();
    }
    const auto values = values_of(states, model);
    if (expected.empty()) expected = values;
    EXPECT_EQ(values, expected);
  }
}

TEST_P(Offload, GrowthKeepsStatesThatAreWrittenLater) {
  constexpr Elems kElements = 3000;
  OffloadedOptimizer states(
      OffloadLayout(Optimizer::adamw, GetParam(), {{kElements, DType::f32}}, kTiny), on_nvme(), 2);
  std::vector<float> values(kElements, 0.5F);
  for (int i = 0; i < 2; ++i) write_values(states, 0, nullptr, {{}, values, {}});
  states.add({{kElements, DType::f16}});  // its masters need larger buffers
  write_values(states, 1, nullptr, {{}, values, {}});
  std::ranges::fill(values, 0.0F);
  read_values(states, 0, nullptr, {{}, values, {}});
  for (const float value : values) EXPECT_NEAR(value, 0.5F, 0.02F);
}

TEST_P(Offload, GrowthBeyondTheBudgetChangesNothing) {
  Model model;
  const Bytes most = OffloadLayout(Optimizer::adamw, GetParam(), model.parameters, kTiny).bytes();
  OffloadedOptimizer states = make(model, on_nvme(most));
  states.begin(model.updates(1, Optimizer::adamw));
  states.finish();
  const auto before = values_of(states, model);
  EXPECT_THROW(states.add({{100000, DType::f32}}), Error);
  EXPECT_EQ(states.layout().parameters().size(), model.parameters.size());
  EXPECT_EQ(values_of(states, model), before);
  states.begin(model.updates(2, Optimizer::adamw));
  states.finish();
}

TEST_P(Offload, CopiedStatesContinueWithTheSameBits) {
  Model model;
  OffloadedOptimizer states = make(model, on_nvme());
  for (int step = 1; step <= 3; ++step) states.begin(model.updates(step, Optimizer::adamw));
  states.finish();
  OffloadedOptimizer copy = make(model, {}, 256);
  for (std::size_t i = 0; i < model.parameters.size(); ++i) {
    copy_states(states, i, copy, i);
  }
  EXPECT_EQ(values_of(copy, model), values_of(states, model));
  EXPECT_THROW(copy_states(states, 0, copy, 1), Error);
}

TEST_P(Offload, ChangedFp16WeightsReplaceTheirMasters) {
  Model model;
  OffloadedOptimizer states = make(model, on_nvme());
  states.begin(model.updates(1, Optimizer::adamw));
  states.finish();
  std::vector<float> before(700), after(700);
  read_values(states, 2, model.weights[2].data(), {before, {}, {}});
  reinterpret_cast<F16*>(model.weights[2].data())[5] = to_f16(3.0F);
  read_values(states, 2, model.weights[2].data(), {after, {}, {}});
  before[5] = 3.0F;
  EXPECT_EQ(after, before);
}

std::vector<float> master_of(OffloadedOptimizer& states, Model& model, std::size_t parameter) {
  std::vector<float> master(model.parameters[parameter].elements);
  read_values(states, parameter, model.weights[parameter].data(), {master, {}, {}});
  return master;
}

TEST_P(Offload, WeightsThatOthersChangeBecomeTheMaster) {
  Model model;
  OffloadedOptimizer states = make(model, on_nvme());
  auto updates = model.updates(1, Optimizer::adamw);
  states.begin(updates);
  states.finish();
  auto* weights = reinterpret_cast<Bf16*>(model.weights[0].data());
  for (Elems i = 0; i < 3000; ++i) weights[i] = to_bf16(2.0F);
  const std::vector<float> expected(3000, 2.0F);
  EXPECT_EQ(master_of(states, model, 0), expected);
  for (ParameterUpdate& update : updates) update.hyper.learning_rate = 0.0;
  states.begin(updates);
  EXPECT_EQ(master_of(states, model, 0), expected);
}

TEST_P(Offload, RestoredWeightsKeepTheirMasters) {
  for (const StatePlace& place : {StatePlace{}, on_nvme()}) {
    Model model, right;
    OffloadedOptimizer states = make(model, place);
    OffloadedOptimizer expected = make(right, {});
    for (int step = 1; step <= 3; ++step) {
      states.begin(model.updates(step, Optimizer::adamw));
      states.finish();
      expected.begin(right.updates(step, Optimizer::adamw));
      expected.finish();
      const auto kept = model.weights;
      for (const std::size_t i : {0U, 2U}) std::ranges::fill(model.weights[i], 1.5F);
      master_of(states, model, 0);  // a read meanwhile changes nothing
      master_of(states, model, 2);
      model.weights = kept;
    }
    EXPECT_EQ(values_of(states, model), values_of(expected, right));
    EXPECT_EQ(model.weights, right.weights);
  }
}

TEST_P(Offload, OneChangedBf16WeightLeavesWeightsOfOtherChecks) {
  Model model;
  OffloadedOptimizer states = make(model, {});
  states.begin(model.updates(1, Optimizer::adamw));
  states.finish();
  auto* weights = reinterpret_cast<Bf16*>(model.weights[0].data());
  std::vector<float> expected = master_of(states, model, 0);
  const std::vector<float> before = expected;
  constexpr Elems kChanged = 2999;  // in the last, incomplete block of its part
  weights[kChanged] = to_bf16(3.0F);
  constexpr Elems kColumns = cpu_adam::WeightChecks::kColumns;
  constexpr Elems kBlock = cpu_adam::WeightChecks::kBlock;
  for (Elems i = kChanged / kBlock * kBlock; i < 3000; ++i) {
    if (i % kColumns == kChanged % kColumns) expected[i] = to_float(weights[i]);
  }
  EXPECT_EQ(master_of(states, model, 0), expected);
  EXPECT_NE(expected, before);
  auto updates = model.updates(2, Optimizer::adamw);
  for (ParameterUpdate& update : updates) update.hyper.learning_rate = 0.0;
  states.begin(updates);
  EXPECT_EQ(master_of(states, model, 0), expected);
}

TEST_P(Offload, ForgottenMastersEqualTheirWeights) {
  Model model;
  OffloadedOptimizer states = make(model, on_nvme());
  states.begin(model.updates(1, Optimizer::adamw));
  for (const std::size_t i : {0U, 1U, 2U}) states.forget_master(i);
  const std::vector<float> bf16 = master_of(states, model, 0);
  const std::vector<float> f16 = master_of(states, model, 2);
  const auto* bf16_weights = reinterpret_cast<const Bf16*>(model.weights[0].data());
  const auto* f16_weights = reinterpret_cast<const F16*>(model.weights[2].data());
  for (Elems i = 0; i < bf16.size(); ++i) EXPECT_EQ(bf16[i], to_float(bf16_weights[i]));
  for (Elems i = 0; i < f16.size(); ++i) EXPECT_EQ(f16[i], to_float(f16_weights[i]));
}

TEST_P(Offload, AwaitedMastersBelongToEqualWeights) {
  Model model;
  OffloadedOptimizer states = make(model, on_nvme());
  states.begin(model.updates(1, Optimizer::adamw));
  states.finish();
  for (const std::size_t i : {0U, 2U}) {
    std::vector<float> master = master_of(states, model, i);
    const auto loaded = model.weights[i];
    std::ranges::fill(model.weights[i], 0.25F);
    const auto present = model.weights[i];
    write_values(states, i, model.weights[i].data(), {master, {}, {}}, NewMaster::awaits_weights);
    EXPECT_EQ(model.weights[i], present);
    EXPECT_NE(master_of(states, model, i), master);
    model.weights[i] = loaded;
    EXPECT_EQ(master_of(states, model, i), master);
  }
}

TEST_P(Offload, AwaitedMastersAreCopied) {
  Model model;
  OffloadedOptimizer states = make(model, on_nvme());
  states.begin(model.updates(1, Optimizer::adamw));
  states.finish();
  const auto expected = values_of(states, model);
  const auto kept = model.weights;
  for (auto& weights : model.weights) std::ranges::fill(weights, 0.25F);
  OffloadedOptimizer copy = make(model, {}, 256);
  for (std::size_t i = 0; i < model.parameters.size(); ++i) copy_states(states, i, copy, i);
  model.weights = kept;
  EXPECT_EQ(values_of(copy, model), expected);
}

INSTANTIATE_TEST_SUITE_P(Moments, Offload,
                         testing::Values(Moments::Format::f32, Moments::Format::bf16_first,
                                         Moments::Format::blockwise8));

}  // namespace
}  // namespace ballast::offload
