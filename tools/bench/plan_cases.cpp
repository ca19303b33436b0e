#include "tools/bench/plan_cases.h"

#include <sstream>

#include <fmt/format.h>

namespace ballast::tools {
namespace {

constexpr std::string_view kModel = R"({{
  "model": {{"family": "gpt2", "vocab_size": 8192, "hidden_size": 768, "num_layers": 6,
             "num_heads": 12, "max_sequence": 512}},
  "data": {{"tokens": ["none"], "token_type": "u32", "sequence_length": 256}},
  "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-4}}}},
  "bf16": {{"enabled": true}},
  "zero_optimization": {{"offload_optimizer": {{"nvme_path": "{0}"}},
                         "offload_param": {{"nvme_path": "{0}"}}}},
  "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
  "ballast": {{"device": "host", "out": "{0}"}}}})";

constexpr std::string_view kOptimizer = "zero_optimization.offload_optimizer.device=";
constexpr std::string_view kWeights = "zero_optimization.offload_param.device=";
constexpr std::string_view kMicro = "train_micro_batch_size_per_gpu=";
constexpr std::string_view kAccumulation = "gradient_accumulation_steps=";

/// Expands the abbreviated keys of the cases.
std::string expand(const std::string& word) {
  const auto value = word.find('=') + 1;
  const std::string key = word.substr(0, value);
  const std::string rest = word.substr(value);
  if (key == "optimizer=") return std::string(kOptimizer) + rest;
  if (key == "weights=") return std::string(kWeights) + rest;
  if (key == "micro=") return std::string(kMicro) + rest;
  if (key == "accumulation=") return std::string(kAccumulation) + rest;
  if (key == "batch=") return "train_batch_size=" + rest;
  if (key == "staging=") return "zero_optimization.offload_optimizer.buffer_count=" + rest;
  if (key == "length=") return "data.sequence_length=" + rest;
  return "ballast." + word;
}

}  // namespace

const std::vector<PlanCase>& plan_cases() {
  static const std::vector<PlanCase> cases = {
      {"compute", "all on the device, large micro-batches", "micro=8 accumulation=2 length=512"},
      {"small", "all on the device, small micro-batches", "micro=1 accumulation=8 length=128"},
      {"memory", "all on the device, very few tokens", "micro=1 accumulation=1 length=8"},
      {"link", "a slow link, weights and optimizer on the host, few tokens",
       "weights=cpu optimizer=cpu link_gbps=0.5 micro=1 accumulation=1 length=128"},
      {"hidden-link", "a slow link, many tokens",
       "weights=cpu optimizer=cpu link_gbps=2 micro=4 accumulation=2"},
      {"update", "8-bit states on the host, one update thread without vectors",
       "weights=cpu optimizer=cpu optimizer_states=8bit update_threads=1 update_isa=scalar micro=1 "
       "accumulation=1 length=64"},
      {"nvme-optimizer", "optimizer on NVMe, few tokens",
       "weights=cpu optimizer=nvme micro=1 accumulation=1 length=128"},
      {"nvme-all", "weights and optimizer on NVMe, few tokens",
       "weights=nvme optimizer=nvme micro=1 accumulation=2 length=128"},
      {"nvme-hidden", "weights and optimizer on NVMe, many tokens",
       "weights=nvme optimizer=nvme micro=8 accumulation=2"},
      {"micro-major", "weights on NVMe, each micro-batch through all blocks",
       "weights=nvme optimizer=cpu order=micro_batch_major micro=1 accumulation=8 length=64"},
      {"activations-host", "activations on the host over a slow link",
       "activations=host optimizer=cpu link_gbps=0.25 micro=4 accumulation=4 length=128"},
      {"activations-nvme", "activations and optimizer on NVMe",
       "activations=nvme optimizer=nvme micro=8 accumulation=4 length=128"},
      {"eager", "optimizer on NVMe, updates inside the backward pass",
       "optimizer=nvme update=eager micro=4 accumulation=1"},
  };
  return cases;
}

const PlanCase& planners_case() {
  static const PlanCase planner = {
      "planner", "the planner's choice",
      "weights=auto optimizer=auto activations=auto micro=auto accumulation=auto batch=8"};
  return planner;
}

const std::vector<PlanCase>& hand_made_cases() {
  static const std::vector<PlanCase> cases = {
      {"nvme-1", "all on NVMe, micro-batches of 1",
       "weights=nvme optimizer=nvme micro=1 accumulation=8"},
      {"nvme-2", "all on NVMe, micro-batches of 2",
       "weights=nvme optimizer=nvme micro=2 accumulation=4"},
      {"nvme-4", "all on NVMe, micro-batches of 4",
       "weights=nvme optimizer=nvme micro=4 accumulation=2"},
      {"nvme-8", "all on NVMe, micro-batches of 8",
       "weights=nvme optimizer=nvme micro=8 accumulation=1"},
      {"states-1", "only the optimizer on NVMe, micro-batches of 1",
       "weights=cpu optimizer=nvme micro=1 accumulation=8"},
      {"states-2", "only the optimizer on NVMe, micro-batches of 2",
       "weights=cpu optimizer=nvme micro=2 accumulation=4"},
      {"states-4", "only the optimizer on NVMe, micro-batches of 4",
       "weights=cpu optimizer=nvme micro=4 accumulation=2"},
      {"states-8", "only the optimizer on NVMe, micro-batches of 8",
       "weights=cpu optimizer=nvme micro=8 accumulation=1"},
      {"resident-2", "weights on the device", "optimizer=nvme micro=2 accumulation=4"},
      {"resident-8", "weights on the device, one micro-batch",
       "optimizer=nvme micro=8 accumulation=1"},
      {"resident-host", "weights on the device, activations on the host",
       "optimizer=nvme activations=host micro=8 accumulation=1"},
      {"resident-nvme", "weights on the device, activations on NVMe",
       "optimizer=nvme activations=nvme micro=8 accumulation=1"},
      {"weights-nvme", "weights on NVMe, optimizer placed by the planner",
       "weights=nvme optimizer=auto micro=8 accumulation=1"},
      {"filled-host", "weights on the host, optimizer placed by the planner",
       "weights=cpu optimizer=auto micro=8 accumulation=1"},
      {"filled-device", "weights on the device, optimizer placed by the planner",
       "optimizer=auto micro=8 accumulation=1"},
      {"filled-2", "filled-device with micro-batches of 2",
       "optimizer=auto micro=2 accumulation=4"},
      {"deep", "filled-device with 4 staging buffers for states",
       "optimizer=auto staging=4 micro=8 accumulation=1"},
      {"shallow", "optimizer on NVMe, 2 staging buffers for states",
       "optimizer=nvme staging=2 micro=8 accumulation=1"},
      {"first", "optimizer of the first block on the host",
       R"(weights=cpu optimizer=nvme staging=2 placement=[{"blocks":"0","optimizer":"host"}] )"
       "micro=8 accumulation=1"},
      {"last", "optimizer of the last layer on the host",
       R"(weights=cpu optimizer=nvme staging=2 placement=[{"blocks":"6-7","optimizer":"host"}] )"
       "micro=8 accumulation=1"},
      {"micro-major", "each micro-batch through all blocks",
       "weights=cpu optimizer=nvme order=micro_batch_major micro=4 accumulation=2"},
  };
  return cases;
}

config::Config make_plan_config(const PlanCase& plan_case, const std::filesystem::path& directory,
                                const std::vector<std::string>& overrides) {
  std::vector<std::string> all;
  std::istringstream words{std::string(plan_case.settings)};
  for (std::string word; words >> word;) {
    // Updates that do not wait for the norm need clipping to be off.
    if (word == "update=eager") all.emplace_back("gradient_clipping=0");
    all.push_back(expand(word));
  }
  all.insert(all.end(), overrides.begin(), overrides.end());
  return config::parse(fmt::format(kModel, directory.string()), directory, "bench plan", all);
}

}  // namespace ballast::tools
