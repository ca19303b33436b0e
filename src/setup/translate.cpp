#include "ballast/setup/translate.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/device/device.h"
#include "ballast/engine/engine.h"
#include "ballast/planner/planner.h"

#include "src/model/description/layer_rules.h"

namespace ballast::setup {
namespace {

std::vector<std::filesystem::path> swap_directories(const config::Config& config) {
  std::vector<std::filesystem::path> found;
  for (const auto* section : {&config.zero.optimizer, &config.zero.parameters}) {
    for (const auto& path : section->nvme_path) {
      if (std::find(found.begin(), found.end(), path) == found.end()) found.push_back(path);
    }
  }
  if (found.empty()) found.push_back(config.ballast.out);
  return found;
}

/// Returns the key that sets a swap directory; "" for the run directory.
std::string swap_key(const config::Config& config, const std::filesystem::path& directory) {
  const auto names = [&](const config::OffloadSection& section) {
    const auto& paths = section.nvme_path;
    return std::find(paths.begin(), paths.end(), directory) != paths.end();
  };
  if (names(config.zero.optimizer)) return "zero_optimization.offload_optimizer.nvme_path";
  return names(config.zero.parameters) ? "zero_optimization.offload_param.nvme_path" : "";
}

/// Whether a run creates the swap directory if it is missing. That of nvme_path must have an
/// existing parent, so that a mistake in the name of a disk is found.
bool may_be_made(const config::Config& config, const std::filesystem::path& directory) {
  if (directory == config.ballast.out) return true;
  std::error_code error;
  const bool missing = std::filesystem::symlink_status(directory, error).type() ==
                       std::filesystem::file_type::not_found;
  return missing && std::filesystem::is_directory(directory.parent_path(), error);
}

/// Returns this process's swap directories among the machine's `directories` (at least one).
std::vector<std::filesystem::path> own_of(const std::vector<std::filesystem::path>& directories,
                                          const comm::Launch& launch) {
  if (directories.size() < launch.local_world) {
    return {directories[launch.local_rank % directories.size()]};
  }
  std::vector<std::filesystem::path> own;
  for (std::size_t i = launch.local_rank; i < directories.size(); i += launch.local_world) {
    own.push_back(directories[i]);
  }
  return own;
}

config::AioPath settings_of(const config::AioSection& aio, const std::filesystem::path& directory) {
  for (const auto& entry : aio.paths) {
    if (entry.path == directory) return entry;
  }
  return {.path = directory,
          .block_size = aio.block_size,
          .queue_depth = aio.queue_depth,
          .backend = aio.backend};
}

step::Options schedule_options(const config::Config& config) {
  step::Options options;
  options.update = config.ballast.update;
  options.expert_updates = config.ballast.expert_updates;
  if (config.ballast.writes_checkpoints()) {
    options.kept_checkpoints = static_cast<std::uint32_t>(config.ballast.checkpoint_keep);
  }
  return options;
}

engine::Constraints constraints_of(const config::Config& config) {
  const config::BallastSection& ballast = config.ballast;
  return {.placement = {.weights = config.zero.parameters.tier,
                        .optimizer = config.zero.optimizer.tier,
                        .activations = ballast.activations,
                        .kept = ballast.kept,
                        .gradients = ballast.gradients},
          .rules = ballast.placement,
          .order = ballast.order,
          .buffers = config.buffers,
          .expert_prefetch = ballast.expert_prefetch,
          .speculative_updates = ballast.speculative_updates,
          .open_expert_ranks = ballast.expert_parallel == 0};
}

engine::ShardingRule sharding_of(const config::Config& config) {
  return {.stage = static_cast<std::uint32_t>(config.zero.stage),
          .hpz_partition_size = config.zero.hpz_partition_size,
          .persistence_threshold = config.zero.persistence_threshold,
          .sub_group_size = config.zero.sub_group_size,
          .quantized_weights = config.zero.quantized_weights,
          .partition_activations = config.partition_activations};
}

/// Returns whether the ranks that share the batch may also share the experts of a layer.
bool may_share_experts(const config::Config& config) {
  if (config.ballast.expert_parallel != 0) return config.ballast.expert_parallel > 1;
  return model::any_has<model::ExpertsSpec>(model::layers_of(config.model));
}

}  // namespace

model::Architecture model_of(const config::Config& config) {
  return config::model_of(config, [](const std::string& path, const std::string& rule) {
    throw Error(ErrorCategory::config, fmt::format("{}: {}", path, rule));
  });
}

memory::Budgets resolve_budgets(const config::Config& config, memory::Budgets requested,
                                Bytes available, std::uint32_t ranks, std::uint32_t local_rank) {
  return memory::resolve_budgets(requested, available,
                                 {.free = own_device_memory(config, local_rank),
                                  .channels = channels_per_device(config, ranks)},
                                 budgeted_devices(config));
}

namespace {

device::DeviceOptions options_of_device(const config::Config& config, std::uint32_t number) {
  return {.kind = std::string(config::name_of(config.ballast.device)),
          .type = config.type,
          .local_rank = number,
          .needs_libraries = config.ballast.kernels != model::KernelSet::plain};
}

}  // namespace

std::vector<std::uint32_t> device_numbers(const config::Config& config, std::uint32_t local_rank) {
  if (!config.ballast.devices.empty()) return config.ballast.devices;
  std::vector<std::uint32_t> numbers(config.devices());
  std::iota(numbers.begin(), numbers.end(), local_rank * config.devices());
  return numbers;
}

device::DeviceOptions device_options(const config::Config& config, std::uint32_t local_rank) {
  return options_of_device(config, device_numbers(config, local_rank).front());
}

std::uint32_t budgeted_devices(const config::Config& config) {
  const auto listed = static_cast<std::uint32_t>(config.ballast.devices.size());
  return config.pipeline.stages == 0 ? std::max(1U, listed) : config.devices();
}

Bytes own_device_memory(const config::Config& config, std::uint32_t local_rank) {
  const std::vector<std::uint32_t> numbers = device_numbers(config, local_rank);
  Bytes least = std::numeric_limits<Bytes>::max();
  for (const std::uint32_t number : numbers) {
    const Bytes all = device::own_memory(options_of_device(config, number));
    const auto sharing = std::count(numbers.begin(), numbers.end(), number);
    least = std::min(least, all / static_cast<Bytes>(sharing));
  }
  return least;
}

Mesh mesh_of(const config::Config& config, std::uint32_t ranks, std::uint32_t rank) {
  const auto sequence = static_cast<std::uint32_t>(config.sequence_parallel);
  const auto tensor = static_cast<std::uint32_t>(config.tensor_parallel);
  const std::uint32_t each = sequence * tensor;
  expects(ranks % each == 0, "the config was checked for another number of ranks");
  return {.data = ranks / each, .sequence = sequence, .tensor = tensor, .rank = rank};
}

model::MicroBatchShape shape_of(const config::Config& config, std::uint64_t sequences) {
  const std::uint64_t parts = config.sequence_parallel;
  return {sequences, config.data.sequence_length / parts, parts};
}

state::SwapOptions swap_options(const config::Config& config, const comm::Launch& launch) {
  const config::AioSection& aio = config.aio;
  state::SwapOptions options;
  options.access = aio.buffered ? aio::File::Access::buffered : aio::File::Access::direct;
  options.any_file_system = aio.any_file_system;
  for (const auto& directory : own_of(swap_directories(config), launch)) {
    const config::AioPath entry = settings_of(aio, directory);
    options.paths.push_back({.directory = directory,
                             .io = {.backend = std::string(config::name_of(entry.backend)),
                                    .block_bytes = entry.block_size,
                                    .depth = entry.queue_depth,
                                    .in_flight_bytes = aio.in_flight_bytes,
                                    .stall_seconds = aio.stall_seconds,
                                    .abandon_seconds = aio.abandon_seconds,
                                    .sqpoll = aio.sqpoll,
                                    .iopoll = aio.iopoll},
                             .read_gbps = entry.read_gbps,
                             .write_gbps = entry.write_gbps,
                             .made_later = may_be_made(config, directory),
                             .key = swap_key(config, directory)});
  }
  return options;
}

std::vector<Bytes> written_by_machine(const config::Config& config, std::uint32_t ranks,
                                      std::span<const Bytes> own) {
  const auto directories = swap_directories(config);
  const Bytes all = std::accumulate(own.begin(), own.end(), Bytes{0});
  std::vector<Bytes> written(directories.size());
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    const auto used = own_of(directories, {.local_rank = rank, .local_world = ranks});
    for (std::size_t i = 0; i < used.size(); ++i) {
      const auto place = std::find(directories.begin(), directories.end(), used[i]);
      written[static_cast<std::size_t>(place - directories.begin())] +=
          used.size() == own.size() ? own[i] : all / used.size();
    }
  }
  return written;
}

namespace {

/// GPU numbers count modulo the GPUs of the machine, so that ranks may share one. Devices of one
/// rank share a GPU only if ballast.devices says so.
void check_number_of_gpus(const config::Config& config, const comm::Launch& launch) {
  if (config.devices() == 1 || !config.ballast.devices.empty()) return;
  if (device::kind_of(device_options(config, launch.local_rank)) == "host") return;
  const std::uint32_t gpus = device::count_gpus();
  const std::uint32_t needed = config.devices() * launch.local_world;
  if (gpus >= needed) return;
  throw Error(
      ErrorCategory::config,
      fmt::format("pipeline.stages: {} devices for {} rank{} need {} GPUs, but this machine "
                  "has {}; give fewer, or let devices share a GPU by listing its number "
                  "more than once in ballast.devices",
                  config.devices(), launch.local_world, launch.local_world == 1 ? "" : "s", needed,
                  gpus));
}

}  // namespace

void check_device(const config::Config& config, const comm::Launch& launch) {
  const config::BallastSection& ballast = config.ballast;
  for (const std::uint32_t number : device_numbers(config, launch.local_rank)) {
    device::require_device(options_of_device(config, number));
  }
  check_number_of_gpus(config, launch);
  const bool for_cuda =
      ballast.kernels != model::KernelSet::best || ballast.gpu_checks != model::GpuChecks::off;
  if (for_cuda && launch.first() &&
      device::kind_of(device_options(config, launch.local_rank)) == "host") {
    log(LogLevel::info,
        "device: ballast.kernels and ballast.gpu_checks have no effect, because this run uses the "
        "host device");
  }
  const Bytes budget = ballast.device_bytes;
  const Bytes free = budget == 0 ? 0 : own_device_memory(config, launch.local_rank);
  const Bytes reserve = memory::library_reserve(free, channels_per_device(config, launch.world));
  // A budget beyond the free memory is refused when the device is made.
  if (budget > free || free - budget >= reserve) return;
  log(LogLevel::warning,
      fmt::format(
          "ballast.device_bytes is {} of {} that are free on the GPU, but the kernels of "
          "cuBLASLt and cuDNN and the buffers of NCCL need up to {} in addition; if the run "
          "fails for lack of device memory, set it to {} or to \"auto\"",
          format_bytes(budget), format_bytes(free), format_bytes(reserve),
          format_bytes(free - reserve)));
}

void check_swap_paths(const config::Config& config, const comm::Launch& launch) {
  if (!constraints_of(config).must_swap()) return;
  const state::SwapOptions options = swap_options(config, launch);
  if (options.paths.front().directory.empty()) return;
  state::check_paths(options);
}

namespace {

engine::DeviceRequest devices_of(const config::Config& config, std::uint32_t local_rank) {
  engine::DeviceRequest request = {
      .options = {},
      .count = config.devices(),
      .listed = static_cast<std::uint32_t>(config.ballast.devices.size()),
      .open = config.pipeline.stages == 0,
      .compute_threads = config.ballast.compute_threads,
      .link_gbps = config.ballast.link_gbps};
  device::DeviceOptions options = options_of_device(config, 0);
  for (const std::uint32_t number : device_numbers(config, local_rank)) {
    options.local_rank = number;
    request.options.push_back(options);
  }
  return request;
}

/// Returns the inputs without the model and the swap paths.
engine::RunInputs settings_of(const config::Config& config, std::uint32_t local_rank) {
  const config::BallastSection& ballast = config.ballast;
  engine::RunInputs run;
  run.trained = config::trained_parts(config);
  run.open_tiles = config.open_tiles;
  run.type = config.type;
  run.states = {config.optimizer.type, ballast.optimizer_states};
  run.batch = {.shape = shape_of(config, config.micro_sequences()),
               .accumulation = config.batch.accumulation,
               .train_batch = config.batch.train_batch,
               .automatic = config.batch.automatic,
               .pairs = !config.data.pairs.empty(),
               .packed = config.has_positions()};
  run.router_losses = ballast.router_losses;
  run.eval_batches = ballast.eval_batches;
  run.sharding = sharding_of(config);
  run.budgets = {ballast.device_bytes, ballast.host_bytes};
  run.constraints = constraints_of(config);
  run.options = schedule_options(config);
  run.devices = devices_of(config, local_rank);
  run.kernels = kernel_request(config);
  run.update = updater_options(config);
  run.update_isa = config::name_of(ballast.update_isa);
  run.state_type = config::name_of(ballast.optimizer_states);
  run.delays = ballast.serial || ballast.delay_seed.has_value();
  return run;
}

}  // namespace

engine::KernelRequest kernel_request(const config::Config& config) {
  const config::BallastSection& ballast = config.ballast;
  using Timing = engine::KernelRequest::Timing;
  engine::KernelRequest request = {
      .set = ballast.kernels, .checks = ballast.gpu_checks, .attention = ballast.attention};
  if (ballast.product_algorithms == config::ProductSearch::heuristic)
    request.timing = Timing::never;
  if (ballast.product_algorithms == config::ProductSearch::timed) request.timing = Timing::always;
  request.names =
      fmt::format("kernels {} checks {} attention {} products {}", config::name_of(ballast.kernels),
                  config::name_of(ballast.gpu_checks), config::name_of(ballast.attention),
                  config::name_of(ballast.product_algorithms));
  return request;
}

cpu_adam::UpdaterOptions updater_options(const config::Config& config) {
  return {.threads = config.ballast.update_threads,
          .isa = config.ballast.update_isa,
          .numa_node = config.ballast.update_numa_node};
}

std::uint32_t channels_per_device(const config::Config& config, std::uint32_t ranks) {
  if (ranks == 1) return 0;
  const Mesh mesh = mesh_of(config, ranks);
  const std::uint32_t sharers = mesh.sharers();
  const std::uint32_t group =
      config.zero.stage >= 3 ? sharding_of(config).copy_sharers(sharers) : 0;
  return engine::ChannelMembers(mesh, group > 0 ? group : sharers,
                                sharers > 1 && may_share_experts(config))
      .count();
}

engine::RunInputs translate(const config::Config& config, const comm::Launch& launch) {
  engine::RunInputs run = settings_of(config, launch.local_rank);
  run.model = model_of(config);
  run.swap = swap_options(config, launch);
  return run;
}

bool leaves_choices(const config::Config& config) {
  return planner::leaves_choices(settings_of(config, 0),
                                 model::count_blocks(config.model, config.rank_split()));
}

}  // namespace ballast::setup
