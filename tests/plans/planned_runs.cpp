#include "tests/plans/planned_runs.h"

#include <cstdint>
#include <filesystem>
#include <utility>

#include "ballast/calibrate/machine_rates.h"
#include "ballast/config/config.h"
#include "ballast/setup/setup.h"

#include "tests/plans/small_runs.h"

namespace ballast::plans {
namespace {

const std::filesystem::path kConfigs = BALLAST_CONFIGS;

engine::Blueprint decide(const config::Config& config, memory::Budgets budgets, std::uint32_t world,
                         std::size_t machine = 1) {
  planner::PlanRequest request = setup::plan_request(config, world);
  request.budgets = budgets;
  request.rates = machines()[machine];
  request.kernels = [&run = request.run](model::MicroBatchShape shape) {
    return kernel_sizes(run.model, run.type, shape);
  };
  return planner::decide(request).blueprint;
}

/// A config file that names its budgets.
engine::Blueprint decide_file(const std::string& name) {
  const config::Config config = config::load(kConfigs / (name + ".json"), {});
  return decide(config, {config.ballast.device_bytes, config.ballast.host_bytes}, 1);
}

engine::Blueprint decide_open(const std::string& model, memory::Budgets budgets,
                              std::uint32_t world, std::size_t machine = 1) {
  const std::string text = R"({
    "model": {)" + model + R"(},
    "data": {"tokens": ["unused"], "sequence_length": 64},
    "train_batch_size": 16, "train_micro_batch_size_per_gpu": "auto",
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "auto"},
                          "offload_param": {"device": "auto"}},
    "ballast": {"device": "host", "activations": "auto", "gradients": "auto", "order": "auto",
                "recompute": "auto", "speculative_updates": "auto", "compute_threads": 1}})";
  return decide(config::parse(text, "/", "open choices", {}, world), budgets, world, machine);
}

}  // namespace

const std::vector<plan::Rates>& machines() {
  static const std::vector<plan::Rates> kMachines = [] {
    plan::Rates desktop = calibrate::load_rates(kConfigs / "rates" / "rtx4090-1nvme.json");
    desktop.network_per_second = 1e9;
    plan::Rates shared = desktop;
    shared.name += ", without a GPU";
    shared.shared_cores = shared.compute_threads = shared.update_threads = 4;
    shared.link_cores = 1.0;
    shared.io_cores = 0.5;
    shared.compute_beside_copy = 0.75;
    shared.compute_beside_io = 0.875;
    std::vector machines = {calibrate::load_rates(kConfigs / "rates" / "h100-node.json"), desktop,
                            shared};
    // The golden hashes are those of rates that include attention and adapters in the curves.
    for (plan::Rates& rates : machines) {
      rates.attention = {};
      rates.adapter_per_second = 0.0;
    }
    return machines;
  }();
  return kMachines;
}

std::vector<PlannedRun> planned_runs() {
  const std::string gpt2 = R"("family": "gpt2", "vocab_size": 512, "hidden_size": 128,
                              "num_layers": 10, "num_heads": 4)";
  const std::string experts = R"("family": "qwen3_moe", "vocab_size": 512, "hidden_size": 128,
                                 "num_layers": 4, "num_heads": 4, "num_experts": 16,
                                 "num_experts_per_tok": 2, "moe_intermediate_size": 512)";
  return {{"demo", "configs/demo.json", [] { return decide_file("demo"); }},
          {"larger-than-memory", "configs/larger-than-memory.json",
           [] { return decide_file("larger-than-memory"); }},
          {"roomy", "10 layers of GPT-2 in 256 MiB + 256 MiB",
           [gpt2] {
             return decide_open(gpt2, {256 * kMiB, 256 * kMiB}, 1);
           }},
          {"tight", "10 layers of GPT-2 in 14 MiB + 12 MiB",
           [gpt2] {
             return decide_open(gpt2, {14 * kMiB, 12 * kMiB}, 1);
           }},
          {"experts", "4 layers of 16 experts on 4 ranks, 42 MiB + 512 MiB each", [experts] {
             // Uses the machine without a GPU, so that it makes no difference whether CUDA is
             // compiled in.
             return decide_open(experts, {42 * kMiB, 512 * kMiB}, 4, 2);
           }}};
}

}  // namespace ballast::plans
