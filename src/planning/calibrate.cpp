#include "ballast/planning/calibrate.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/build_info.h"
#include "ballast/core/cpu.h"
#include "ballast/core/error.h"
#include "ballast/core/log.h"
#include "ballast/cpu_adam/updater.h"
#include "ballast/device/host_stream.h"
#include "ballast/memory/topology.h"

#include "src/engine/swap_options.h"
#include "src/planning/calibration.h"

namespace ballast::planning {
namespace {

/// Most that the output matrix of the sample and its gradient take.
constexpr Bytes kMatrixBytes = 224 * kMiB;
/// Most that the buffers take that are to be cold.
constexpr Bytes kMostCold = 256 * kMiB;
/// Caches are taken to be this large where nobody tells.
constexpr Bytes kSomeCache = 64 * kMiB;

/// One layer and the head. The head's rate hardly depends on the size of a large vocabulary.
model::Architecture one_layer(const model::Architecture& model, DType type) {
  model::ModelConfig config = model.config;
  config.num_layers = 1;
  const Bytes row = config.hidden_size * (size_of(type) + size_of(DType::f32));
  config.vocab_size = std::clamp<std::uint64_t>(kMatrixBytes / row, 1, config.vocab_size);
  return model::build_architecture(config);
}

/// `config` with nothing to choose and everything in host memory.
config::Config all_on_host(config::Config config) {
  config.zero.parameters.tier = Tier::host;
  config.zero.optimizer.tier = Tier::host;
  config.ballast.activations = Tier::device;
  config.ballast.recompute = true;
  config.ballast.placement.clear();
  config.batch.micro_batch = 1;
  config.batch.accumulation = 1;
  return config;
}

/// Whether a tier of the config is one for which `wanted` holds.
template <class Wanted>
bool any_tier(const config::Config& config, Wanted wanted) {
  if (wanted(config.zero.parameters.tier) || wanted(config.zero.optimizer.tier) ||
      wanted(config.ballast.activations)) {
    return true;
  }
  const auto& rules = config.ballast.placement;
  return std::any_of(rules.begin(), rules.end(), [](const config::PlacementRule& rule) {
    return rule.weights == Tier::nvme || rule.optimizer == Tier::nvme ||
           rule.activations == Tier::nvme;
  });
}

/// Measures the paths to swap to. Where a run may do without them, they may be unfit.
void try_swap(const Sample& sample, schedule::Rates& rates) {
  const bool needed =
      any_tier(sample.config, [](const config::TierChoice& tier) { return tier == Tier::nvme; });
  try {
    measure_swap(sample, rates);
  } catch (const Error& error) {
    if (needed || error.category() != ErrorCategory::io) throw;
    log(LogLevel::warning, fmt::format("rates: nothing is planned on NVMe: {}", error.what()));
  }
}

std::string describe_paths(const config::Config& config) {
  if (!may_swap(config)) return "none";
  const state::SwapOptions options = engine::swap_options(config);
  std::string text;
  for (const state::SwapPath& path : options.paths) {
    // A run directory has another name in every run.
    const auto place = path.made_later ? path.directory.parent_path() : path.directory;
    text +=
        fmt::format("{} {} block {} depth {} flight {} poll {} {} gbps {} {}; ", place.string(),
                    path.io.backend, path.io.block_bytes, path.io.depth, path.io.in_flight_bytes,
                    path.io.sqpoll, path.io.iopoll, path.read_gbps, path.write_gbps);
  }
  return text +
         (options.access == aio::File::Access::buffered ? "through the page cache" : "direct");
}

}  // namespace

double median_seconds(const Patience& patience, const std::function<void()>& work,
                      const std::function<void()>& prepare) {
  using Clock = std::chrono::steady_clock;
  work();
  std::vector<double> seconds;
  double total = 0.0;
  while (seconds.size() < patience.least ||
         (total < patience.seconds && seconds.size() < patience.most)) {
    if (prepare) prepare();
    const auto start = Clock::now();
    work();
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
    total += seconds.back();
  }
  const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2);
  std::nth_element(seconds.begin(), middle, seconds.end());
  return std::max(*middle, 1e-9);
}

Sample make_sample(const config::Config& config, const model::Architecture& model) {
  constexpr Bytes kNoLimit = std::numeric_limits<Bytes>::max();
  const DType type = config.bf16 ? DType::bf16 : DType::f32;
  return {.config = config,
          .blueprint = engine::draw_blueprint(all_on_host(config), one_layer(model, type),
                                              {.device = kNoLimit, .host = kNoLimit}, {}),
          .blocks = model.blocks.size(),
          .last_level_cache = memory::read_topology().last_level_cache};
}

std::size_t cold_copies(const Sample& sample, Bytes bytes) {
  const Bytes cache = sample.last_level_cache > 0 ? sample.last_level_cache : kSomeCache;
  const Bytes cold = std::min(8 * cache, kMostCold);
  return std::clamp<std::size_t>((cold + bytes - 1) / bytes, 1, sample.blocks);
}

bool may_swap(const config::Config& config) {
  return any_tier(config, [](const config::TierChoice& tier) {
    return tier.value_or(Tier::nvme) == Tier::nvme;
  });
}

schedule::Rates calibrate(const config::Config& config, const model::Architecture& model) {
  const Sample sample = make_sample(config, model);
  schedule::Rates rates;
  rates.name = "this machine";
  measure_compute(sample, rates);
  measure_update(sample, rates);
  measure_link(sample, rates);
  if (may_swap(config)) try_swap(sample, rates);
  return rates;
}

std::string calibration_key(const config::Config& config, const model::Architecture& model) {
  const config::BallastSection& ballast = config.ballast;
  const model::ModelConfig& m = model.config;
  const int threads =
      ballast.compute_threads > 0 ? ballast.compute_threads : device::default_compute_threads();
  std::string key = fmt::format(
      "ballast {}; {}; {} CPUs; device {} attention {}; compute threads {}; ", version(),
      cpu_name(), usable_cpus(), ballast.device + device::gpu_name({.kind = ballast.device}),
      ballast.attention, threads);
  key += fmt::format("update threads {} isa {} of {} node {} states {} optimizer {}; link {}; ",
                     ballast.update_threads, ballast.update_isa, to_string(cpu_adam::active()),
                     ballast.update_numa_node.value_or(-1), ballast.optimizer_states,
                     static_cast<int>(config.optimizer.type), ballast.link_gbps);
  key += fmt::format(
      "{} {} hidden {} intermediate {} heads {} of {} vocabulary {} tied {} blocks {} ",
      config.bf16 ? "bf16" : "fp32", to_string(m.family), m.hidden_size, m.intermediate_size,
      m.num_heads, m.num_kv_heads, m.vocab_size, m.tie_embeddings, model.blocks.size());
  key += fmt::format("length {} micro-batch {}; swap {}", config.data.sequence_length,
                     config.batch.micro_batch, describe_paths(config));
  return key;
}

}  // namespace ballast::planning
