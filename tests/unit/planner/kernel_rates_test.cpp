// Plans promise no more than the kernels of their layers give: each class of attention reaches the
// simulator with its rates, and shipped rates stay below the peaks of their devices.

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/calibrate/machine_rates.h"
#include "ballast/config/config.h"
#include "ballast/plan/simulator.h"
#include "ballast/setup/setup.h"

#include "tests/support/fixtures.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"

namespace ballast::setup::kernel_rates_test {
namespace {

using Classes = std::set<AttentionClass>;

struct Machine {
  std::string file;
  plan::Rates rates;
  double peak;  ///< rated FLOP/s of dense products in 16 bits
};

double peak_of(std::string_view file) {
  if (file.starts_with("rtx4090")) return 165.2e12;
  if (file.starts_with("h100") || file.starts_with("h200")) return 989e12;
  EXPECT_TRUE(file.starts_with("dgx2")) << file << " needs a peak here";
  return 125e12;
}

const std::vector<Machine>& machines() {
  static const std::vector<Machine> all = [] {
    std::vector<Machine> found;
    const std::filesystem::path folder = std::filesystem::path(BALLAST_CONFIGS) / "rates";
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      if (entry.path().extension() != ".json") continue;
      const std::string name = entry.path().filename();
      found.push_back({name, calibrate::load_rates(entry.path()), peak_of(name)});
    }
    return found;
  }();
  return all;
}

engine::Blueprint draw(const std::string& model, bool bf16,
                       const std::vector<std::string>& overrides = {}) {
  const test::TempDir directory;
  return draw_blueprint(test::tiny_config(model, bf16, directory.path(), overrides));
}

Classes classes_of(const engine::Blueprint& blueprint) {
  Classes found;
  for (const plan::Operation& operation : blueprint.schedule.first.operations) {
    if (operation.attention_flops + operation.attention_backward_flops > 0.0) {
      found.insert(operation.attention);
    }
  }
  return found;
}

/// A small model with heads of full width.
struct Form {
  std::string name;
  std::string model;
  bool bf16;
  Classes classes;
};

const std::vector<Form>& forms() {
  using enum AttentionClass;
  const std::string sizes = R"("vocab_size": 61, "hidden_size": 32, "num_layers": 2,
      "num_heads": 2, "intermediate_size": 40, "max_sequence": 48, )";
  const auto one_head = [&](const std::string& more) {
    return sizes + R"("num_kv_heads": 1, )" + more;
  };
  const std::string delta = one_head(R"("family": "qwen3_5", "head_dim": 256,
      "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1,
      "linear_num_value_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128)");
  const std::string latent = R"("qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
      "v_head_dim": 128, "q_lora_rank": 16, "kv_lora_rank": 16)";
  static const std::vector<Form> all = {
      {"heads of 128", one_head(R"("family": "llama", "head_dim": 128)"), true, {heads_128}},
      {"fp32", one_head(R"("family": "llama", "head_dim": 128)"), false, {plain}},
      {"heads of 256", one_head(R"("family": "gemma3", "head_dim": 256)"), true, {heads_256}},
      {"heads of 512",
       one_head(R"("family": "gemma4", "head_dim": 256, "global_head_dim": 512,
                   "layer_types": ["sliding_attention", "full_attention"])"),
       true,
       {heads_256, plain}},
      {"soft caps",
       one_head(R"("family": "gemma2", "attn_logit_softcapping": 50.0, "head_dim": 128)"),
       true,
       {capped_128}},
      {"soft caps, heads of 256",
       one_head(R"("family": "gemma2", "attn_logit_softcapping": 50.0, "head_dim": 256)"),
       true,
       {capped_256}},
      {"delta nets", delta, true, {heads_256, recurrence}},
      {"latent attention",
       sizes + R"("family": "deepseek_v3", "first_k_dense_replace": 2, )" + latent,
       true,
       {heads_192}}};
  return all;
}

TEST(KernelRates, ShippedOnesStayBelowThePeaksOfTheirDevices) {
  ASSERT_EQ(machines().size(), 8U);
  for (const auto& [file, rates, peak] : machines()) {
    for (const plan::Curve* curve : {&rates.forward, &rates.backward, &rates.head}) {
      for (const plan::CurvePoint& point : *curve) EXPECT_LE(point.flops_per_second, peak) << file;
    }
    EXPECT_LE(rates.adapter_per_second, rates.device_memory_per_second) << file;
    // 1%: shipped rates are rounded.
    EXPECT_GE(1.01 * rates.adapter_per_second, plan::kAdapterShare * rates.device_memory_per_second)
        << file;
    const bool attention = rates.of(AttentionClass::heads_128).forward > 0.0;
    for (const AttentionClassInfo& info : kAttentionClasses) {
      const plan::AttentionRate& rate = rates.of(info.id);
      const plan::AttentionRate& like = rates.of(info.substitute);
      EXPECT_EQ(rate.forward > 0.0, attention) << file << " " << info.key;
      EXPECT_EQ(rate.backward > 0.0, attention) << file << " " << info.key;
      EXPECT_LE(rate.forward, peak) << file << " " << info.key;
      EXPECT_LE(rate.backward, rate.forward) << file << " " << info.key;
      // A missing rate promises no more than a shipped one.
      EXPECT_LE(info.forward * like.forward, rate.forward) << file << " " << info.key;
      EXPECT_LE(info.backward * like.backward, rate.backward) << file << " " << info.key;
    }
  }
}

TEST(KernelRates, EachModelHasTheClassesOfItsHeads) {
  Classes all;
  for (const Form& form : forms()) {
    const Classes found = classes_of(draw(form.model, form.bf16));
    EXPECT_EQ(found, form.classes) << form.name;
    all.insert(found.begin(), found.end());
  }
  EXPECT_EQ(all.size(), kAttentionClassCount);
}

/// Least seconds of an operation on a machine: attention by the rates of its class, and all other
/// products at the peak.
double least_seconds(const plan::Operation& operation, const Machine& machine) {
  const plan::AttentionRate& rate = machine.rates.of(operation.attention);
  const bool own = rate.forward > 0.0;
  const double attention = operation.attention_flops + operation.attention_backward_flops;
  const double rest = (own ? operation.flops - attention : operation.flops) / machine.peak;
  if (!own) return rest;
  return rest + operation.attention_flops / rate.forward +
         operation.attention_backward_flops / rate.backward;
}

void expect_above_roofline(const engine::Blueprint& blueprint, const std::string& name) {
  for (Machine machine : machines()) {
    machine.rates.launch_seconds = 0.0;  // longer than the kernels of small models
    for (const plan::Operation& operation : blueprint.schedule.first.operations) {
      if (operation.flops == 0.0) continue;
      EXPECT_GE(plan::seconds_alone(operation, blueprint.schedule, machine.rates),
                least_seconds(operation, machine) * (1.0 - 1e-9))
          << name << ", " << machine.file << ": block " << operation.block;
    }
  }
}

TEST(KernelRates, PassesOfAllFamiliesStayBelowTheirRoofline) {
  for (const Form& form : forms()) expect_above_roofline(draw(form.model, form.bf16), form.name);
  for (const auto& entry : std::filesystem::directory_iterator(test::fixture("families"))) {
    if (entry.path().extension() != ".json") continue;
    nlohmann::json record;
    std::ifstream(entry.path()) >> record;
    if (!record.contains("model")) continue;
    std::string model = record["model"].dump();
    model = model.substr(1, model.size() - 2);
    expect_above_roofline(draw(model, true), entry.path().stem());
  }
}

/// Seconds of all operations of a plan alone that compute.
double compute_seconds(const engine::Blueprint& blueprint, const plan::Rates& rates) {
  double sum = 0.0;
  for (const plan::Operation& operation : blueprint.schedule.first.operations) {
    if (operation.action != plan::Action::compute) continue;
    sum += plan::seconds_alone(operation, blueprint.schedule, rates);
  }
  return sum;
}

TEST(KernelRates, EachClassReachesTheSimulator) {
  for (const Form& form : forms()) {
    const engine::Blueprint blueprint = draw(form.model, form.bf16);
    for (const AttentionClassInfo& info : kAttentionClasses) {
      plan::Rates rates =
          calibrate::load_rates(std::string(BALLAST_CONFIGS) + "/rates/h100-node.json");
      const double before = compute_seconds(blueprint, rates);
      rates.of(info.id).forward /= 1e6;
      const bool slower = compute_seconds(blueprint, rates) > before;
      EXPECT_EQ(slower, form.classes.contains(info.id)) << form.name << ", " << info.key;
    }
  }
}

TEST(KernelRates, AdaptersCountTheirTraffic) {
  const std::string model = forms().front().model;
  const engine::Blueprint blueprint =
      draw(model, true,
           {"ballast.train=adapters", R"(ballast.adapters={"targets": ["q_proj"], "rank": 2})",
            "ballast.recompute=true"});
  // Layers of 2 x 37 tokens in bf16: q_proj maps 32 inputs to 256 outputs.
  constexpr Bytes kToken = 2;
  constexpr Bytes kForward = 74 * kToken * (32 + 2 * 256);
  constexpr Bytes kBackward = 74 * kToken * (4 * 32 + 2 * 256) + kForward;
  std::set<Bytes> found;
  for (const plan::Operation& operation : blueprint.schedule.first.operations) {
    if (operation.adapter_traffic > 0) found.insert(operation.adapter_traffic);
  }
  EXPECT_EQ(found, (std::set<Bytes>{kForward, kBackward}));
  for (const plan::Operation& operation : draw(model, true).schedule.first.operations) {
    EXPECT_EQ(operation.adapter_traffic, 0U);
  }
}

}  // namespace
}  // namespace ballast::setup::kernel_rates_test
