#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ballast/config/config.h"
#include "ballast/core/random.h"
#include "ballast/plan/rates.h"

namespace ballast::test {

/// Random choices that depend only on the seed.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : seed_(seed) {}

  std::uint64_t below(std::uint64_t n) { return random_u64(seed_, drawn_++) % n; }
  bool chance(std::uint64_t percent) { return below(100) < percent; }
  template <class T>
  T pick(const std::vector<T>& choices) {
    return choices[below(choices.size())];
  }
  std::string name(const std::vector<std::string>& choices) { return pick(choices); }

 private:
  std::uint64_t seed_;
  std::uint64_t drawn_ = 0;
};

/// A random run of a small model on the host device, as overrides of one config. Its budgets are
/// not drawn.
struct RandomRun {
  std::uint32_t world = 1;
  std::vector<std::string> overrides;

  [[nodiscard]] config::Config config(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> all = overrides;
    all.insert(all.end(), more.begin(), more.end());
    return config::parse(R"({"data": {"tokens": "unused.bin"}, "aio": {"any_file_system": true},
                             "ballast": {"device": "host", "compute_threads": 1}})",
                         "/", "random", all, world);
  }
  [[nodiscard]] std::string describe() const {
    return fmt::format("{} rank(s), --set {}", world, fmt::join(overrides, " --set "));
  }
};

inline void draw_model(Dice& dice, std::vector<std::string>& set) {
  const bool llama = dice.chance(50);
  set.push_back(fmt::format("model.family={}", llama ? "llama" : "gpt2"));
  set.push_back(fmt::format("model.num_layers={}", 1 + dice.below(3)));
  const int width = dice.pick<int>({16, 64, 96, 128});
  set.push_back(fmt::format("model.hidden_size={}", width));
  set.push_back("model.num_heads=4");
  if (llama) set.push_back(fmt::format("model.num_kv_heads={}", dice.pick<int>({1, 2, 4})));
  const int vocabulary = dice.pick<int>({64, 256, 1000, 4096});
  set.push_back(fmt::format("model.vocab_size={}", vocabulary));
  if (vocabulary == 1000) {
    set.push_back(fmt::format("model.vocabulary_tiles={}", 1 + width / 32 % 4));
  }
  if (llama && width == 96) set.push_back(fmt::format("model.layer_tiles={}", 1 + vocabulary % 3));
  set.push_back(fmt::format("model.tie_embeddings={}", dice.chance(50)));
  set.push_back(fmt::format("data.sequence_length={}", dice.pick<int>({8, 31, 64, 256})));
  set.push_back(fmt::format("bf16.enabled={}", dice.chance(60)));
  set.push_back("optimizer.type=" + dice.name({"AdamW", "AdamW", "Adagrad", "Lion", "SGD"}));
  set.push_back("ballast.optimizer_states=" + dice.name({"fp32", "fp32", "8bit"}));
}

inline void draw_batch(Dice& dice, std::uint32_t world, std::vector<std::string>& set) {
  const std::uint64_t share = dice.pick<std::uint64_t>({1, 2, 3, 4, 6, 8, 12});
  set.push_back(fmt::format("train_batch_size={}", share * world));
  std::string size = "auto";
  if (dice.chance(60)) {
    std::vector<std::uint64_t> sizes;
    for (std::uint64_t d = 1; d <= share; ++d) {
      if (share % d == 0) sizes.push_back(d);
    }
    size = std::to_string(dice.pick(sizes));
  }
  set.push_back("train_micro_batch_size_per_gpu=" + size);
  set.push_back(fmt::format("ballast.eval_batches={}", 1 + dice.below(4)));
}

inline void draw_ranks(Dice& dice, std::uint32_t world, std::vector<std::string>& set) {
  const std::uint64_t stage = dice.below(4);
  set.push_back(fmt::format("zero_optimization.stage={}", stage));
  if (stage < 3) return;
  set.push_back(fmt::format("zero_optimization.zero_quantized_weights={}", dice.chance(30)));
  set.push_back(fmt::format("zero_optimization.stage3_param_persistence_threshold={}",
                            dice.pick<int>({0, 0, 5000, 100000})));
  if (world == 4 && dice.chance(40))
    set.emplace_back("zero_optimization.zero_hpz_partition_size=2");
}

inline void draw_placement(Dice& dice, std::vector<std::string>& set) {
  const std::vector<std::string> devices = {"none", "cpu", "nvme", "auto", "auto"};
  const std::vector<std::string> tiers = {"device", "host", "nvme"};
  set.push_back("zero_optimization.offload_optimizer.device=" + dice.name(devices));
  set.push_back("zero_optimization.offload_param.device=" + dice.name(devices));
  set.push_back("ballast.activations=" + dice.name({"device", "host", "nvme", "auto", "auto"}));
  if (dice.chance(50)) set.push_back("ballast.gradients=" + dice.name({"nvme", "auto"}));
  set.push_back("ballast.recompute=" +
                dice.name({"true", "false", "except_attention", "auto", "auto"}));
  set.push_back("ballast.order=" + dice.name({"layer_major", "micro_batch_major",
                                              "micro_batch_major_offload", "auto"}));
  if (dice.chance(30)) {
    set.push_back(fmt::format(R"(ballast.placement=[{{"blocks": {}, "{}": "{}"}}])", dice.below(3),
                              dice.name({"weights", "optimizer", "activations"}),
                              dice.name(tiers)));
  }
  if (dice.chance(25)) {
    set.emplace_back("gradient_clipping=0");
    set.emplace_back("ballast.update=eager");
  }
  for (const char* key :
       {"zero_optimization.offload_optimizer.buffer_count",
        "zero_optimization.offload_param.buffer_count", "ballast.device_weight_buffers",
        "ballast.activation_buffers", "ballast.gradient_buffers"}) {
    if (dice.chance(30)) set.push_back(fmt::format("{}={}", key, 1 + dice.below(4)));
  }
}

inline RandomRun draw_run(Dice& dice, bool several_ranks) {
  RandomRun run;
  if (several_ranks && dice.chance(40)) run.world = dice.chance(50) ? 2 : 4;
  draw_model(dice, run.overrides);
  draw_batch(dice, run.world, run.overrides);
  draw_ranks(dice, run.world, run.overrides);
  draw_placement(dice, run.overrides);
  Dice sizes = dice;  // leaves later draws unchanged
  if (sizes.chance(30)) {
    run.overrides.push_back(
        fmt::format("zero_optimization.sub_group_size={}", sizes.pick<int>({2048, 5000, 20000})));
  }
  if (sizes.chance(40)) {
    run.overrides.push_back(fmt::format(
        R"(ballast.train=["{}"])", sizes.name({"*.0.*", "*.0.mlp.*", "*mlp*", "*.weight", "*"})));
  }
  return run;
}

/// A machine with fast compute, so that transfers determine the step time, and two ranks per node.
inline plan::Rates quick_machine() {
  plan::Rates rates;
  rates.name = "test machine";
  rates.forward = {{64.0, 40e9}, {1024.0, 100e9}};
  rates.backward = rates.forward;
  rates.head = rates.forward;
  rates.device_memory_per_second = 20e9;
  rates.launch_seconds = 5e-6;
  rates.update_per_second = 10e9;
  rates.upload_per_second = 4e9;
  rates.offload_per_second = 4e9;
  rates.read_per_second = 1e9;
  rates.write_per_second = 0.8e9;
  rates.mixed_per_second = 1.2e9;
  rates.io_latency_seconds = 1e-4;
  rates.fabric_per_second = 2e9;
  rates.network_per_second = 1e9;
  rates.ranks_per_node = 2;
  return rates;
}

}  // namespace ballast::test
