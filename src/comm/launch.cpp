#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <optional>
#include <string_view>

#include <fmt/format.h>

#include "ballast/comm/communicator.h"
#include "ballast/core/error.h"

namespace ballast::comm {
namespace {

/// Slurm numbers job steps from 0. sbatch scripts and salloc shells have step numbers from this on.
/// There, SLURM_NTASKS is the number of tasks that may be started, not of running ones.
constexpr std::uint32_t kNamelessSlurmSteps = 0xfffffff0U;

[[noreturn]] void refuse(std::string_view variable, std::string_view value, std::string_view why) {
  throw Error(ErrorCategory::usage,
              fmt::format("{}={} in the environment {}; start with mpirun or srun, or unset it",
                          variable, value, why));
}

std::optional<std::string_view> text_of(const char* variable) {
  const char* value = std::getenv(variable);
  if (value == nullptr) return std::nullopt;
  return value;
}

bool is_set(const char* variable) {
  return text_of(variable).has_value();
}

std::optional<std::uint32_t> parse(std::string_view text) {
  std::uint32_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

/// Returns the number in `variable`, which must be set if `because` is.
std::uint32_t number_in(const char* variable, const char* because) {
  const auto text = text_of(variable);
  if (!text) {
    refuse(because, *text_of(because), fmt::format("needs {}, which is not set", variable));
  }
  const auto number = parse(*text);
  if (!number) refuse(variable, *text, "is not a number");
  return *number;
}

/// Names of the variables for a process's rank and the number of processes.
struct Numbering {
  const char* rank;
  const char* world;
};

bool mentions(Numbering numbering) {
  return is_set(numbering.rank) || is_set(numbering.world);
}

void read(Numbering numbering, std::uint32_t& rank, std::uint32_t& world) {
  world = number_in(numbering.world, numbering.rank);
  rank = number_in(numbering.rank, numbering.world);
  if (world == 0) refuse(numbering.world, "0", "is not a valid number of processes");
  if (rank >= world) {
    refuse(numbering.rank, std::to_string(rank),
           fmt::format("contradicts {}={}", numbering.world, world));
  }
}

void check_local_world(const Launch& launch, const char* variable) {
  if (launch.local_world > launch.world) {
    refuse(variable, std::to_string(launch.local_world),
           fmt::format("is more than the {} processes of the run", launch.world));
  }
}

/// Returns entry `node` of Slurm's short form: "4(x2),3" is 4, 4 and 3 tasks.
std::uint32_t tasks_on_node(const char* variable, std::uint32_t node) {
  const std::string_view whole = *text_of(variable);
  std::string_view rest = whole;
  std::uint64_t nodes = 0;
  while (!rest.empty()) {
    std::string_view entry = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), entry.size() + 1));
    std::optional<std::uint32_t> times = 1;
    if (const auto repeat = entry.find("(x"); repeat != std::string_view::npos) {
      times = entry.ends_with(')') ? parse(entry.substr(repeat + 2, entry.size() - repeat - 3))
                                   : std::nullopt;
      entry = entry.substr(0, repeat);
    }
    const auto tasks = parse(entry);
    if (!times || !tasks || *tasks == 0) refuse(variable, whole, "is not a list of tasks per node");
    nodes += *times;
    if (node < nodes) return *tasks;
  }
  refuse(variable, whole, fmt::format("has no entry for node {} (SLURM_NODEID)", node));
}

bool inside_srun() {
  return is_set("SLURM_STEP_ID") &&
         number_in("SLURM_STEP_ID", "SLURM_STEP_ID") < kNamelessSlurmSteps;
}

void read_slurm_local(Launch& launch) {
  launch.local_rank = number_in("SLURM_LOCALID", "SLURM_STEP_ID");
  const char* variable = "SLURM_TASKS_PER_NODE";
  if (is_set(variable)) {
    const bool numbered = is_set("SLURM_NODEID");
    const std::uint32_t node = numbered ? number_in("SLURM_NODEID", "SLURM_NODEID") : 0;
    launch.local_world = tasks_on_node(variable, node);
  } else {
    variable = "SLURM_NTASKS_PER_NODE";
    launch.local_world = number_in(variable, "SLURM_LOCALID");
  }
  if (launch.local_rank >= launch.local_world) {
    refuse("SLURM_LOCALID", std::to_string(launch.local_rank),
           fmt::format("contradicts {}={}", variable, *text_of(variable)));
  }
  check_local_world(launch, variable);
}

Launch read_open_mpi() {
  constexpr Numbering kLocal = {"OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"};
  Launch launch = {.launcher = "mpirun (Open MPI)"};
  read({"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}, launch.rank, launch.world);
  if (!mentions(kLocal)) number_in(kLocal.rank, "OMPI_COMM_WORLD_SIZE");
  read(kLocal, launch.local_rank, launch.local_world);
  check_local_world(launch, kLocal.world);
  return launch;
}

Launch read_pmi() {
  constexpr Numbering kLocal = {"MPI_LOCALRANKID", "MPI_LOCALNRANKS"};
  Launch launch = {.launcher = "mpiexec (PMI)"};
  read({"PMI_RANK", "PMI_SIZE"}, launch.rank, launch.world);
  if (!mentions(kLocal) && inside_srun()) {  // srun --mpi=pmi2
    launch.launcher = "srun";
    read_slurm_local(launch);
    return launch;
  }
  if (!mentions(kLocal)) {
    if (launch.world == 1) return launch;
    number_in(kLocal.rank, "PMI_SIZE");
  }
  read(kLocal, launch.local_rank, launch.local_world);
  check_local_world(launch, kLocal.world);
  return launch;
}

Launch read_srun() {
  Launch launch = {.launcher = "srun"};
  number_in("SLURM_NTASKS", "SLURM_STEP_ID");
  read({"SLURM_PROCID", "SLURM_NTASKS"}, launch.rank, launch.world);
  read_slurm_local(launch);
  return launch;
}

/// A launcher that is found by the variables for rank and number of processes.
struct KnownLauncher {
  std::string_view name;
  Numbering numbering;
};
constexpr std::array kOthers = {
    KnownLauncher{"torchrun, accelerate or deepspeed", {"RANK", "WORLD_SIZE"}},
    KnownLauncher{"flux", {"FLUX_TASK_RANK", "FLUX_JOB_SIZE"}},
    KnownLauncher{"jsrun", {"JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"}},
    KnownLauncher{"mpirun_rsh", {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"}},
    KnownLauncher{"horovodrun", {"HOROVOD_RANK", "HOROVOD_SIZE"}},
};

}  // namespace

std::optional<OtherLauncher> find_other_launcher() {
  if (!read_launch().launcher.empty()) return std::nullopt;
  for (const KnownLauncher& known : kOthers) {
    const auto rank_text = text_of(known.numbering.rank);
    const auto world_text = text_of(known.numbering.world);
    if (!rank_text || !world_text) continue;
    const auto rank = parse(*rank_text);
    const auto world = parse(*world_text);
    if (!rank || !world || *world <= 1) continue;
    return OtherLauncher{
        .name = std::string(known.name),
        .variables = fmt::format("{} and {}", known.numbering.rank, known.numbering.world),
        .rank = *rank,
        .world = *world};
  }
  return std::nullopt;
}

Launch read_launch() {
  // The order matters: mpirun and mpiexec may start their daemons with srun, so the processes of
  // the run may also see srun's variables.
  if (mentions({"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"})) return read_open_mpi();
  if (mentions({"PMI_RANK", "PMI_SIZE"})) return read_pmi();
  if (inside_srun()) return read_srun();
  return {};
}

}  // namespace ballast::comm
