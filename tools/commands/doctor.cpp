#include "tools/commands/doctor.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>

#include <fmt/format.h>
#include <sys/resource.h>

#include "ballast/aio/file.h"
#include "ballast/aio/queue.h"
#include "ballast/comm/communicator.h"
#include "ballast/core/error.h"
#include "ballast/core/machine.h"
#include "ballast/core/units.h"
#include "ballast/memory/machine.h"
#include "ballast/model/compute.h"
#include "ballast/model/cuda_libraries.h"
#include "ballast/setup/translate.h"

#include "tools/command_line.h"
#include "tools/commands/requests.h"
#include "tools/signals.h"

namespace ballast::tools {
namespace {

namespace fs = std::filesystem;

std::string first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

Finding check_cpu() {
  const int cpus = usable_cpus();
  return {.name = "CPU",
          .text = fmt::format("{}, {} usable thread{}, {}", cpu_name(), cpus, cpus == 1 ? "" : "s",
                              memory::describe(memory::read_topology()))};
}

/// bf16 products on CPUs without these instructions are computed in fp32.
Finding check_instructions() {
  const std::string found = cpu_flags({"avx2", "avx512f", "avx512_bf16", "amx_bf16", "bf16"});
  const bool has_bf16 = found.find("bf16") != std::string::npos;
  const std::string kernels = model::host_kernels(usable_cpus());
  return {.severity = has_bf16 ? Severity::good : Severity::hint,
          .name = "instructions",
          .text = fmt::format("{}; {}{}", found.empty() ? "none of AVX2 to AMX" : found, kernels,
                              has_bf16 ? ""
                                       : "; training on this CPU in bf16 is slow without "
                                         "AVX-512 BF16 or AMX")};
}

Finding check_free_memory() {
  Finding finding = {.name = "memory",
                     .text = fmt::format("{} available", format_bytes(memory::available_memory()))};
  rlimit limit = {};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return finding;
  finding.severity = Severity::hint;
  finding.text += fmt::format(
      "; a process may map only {}, which its budgets, stacks and libraries share: ulimit -v "
      "unlimited",
      format_bytes(Bytes{limit.rlim_cur}));
  return finding;
}

Finding check_huge_pages() {
  const std::string modes = first_line("/sys/kernel/mm/transparent_hugepage/enabled");
  Finding finding = {.name = "huge pages", .text = modes.empty() ? "unknown" : modes};
  if (modes.find("[never]") == std::string::npos) return finding;
  finding.severity = Severity::hint;
  finding.text +=
      "; updates and transfers are faster with them: echo madvise > "
      "/sys/kernel/mm/transparent_hugepage/enabled";
  return finding;
}

/// Returns how to make io_uring usable, or "".
std::string io_uring_remedy(std::string_view reason) {
  if (reason.find("denied") == std::string_view::npos) return "";
  const std::string disabled = first_line("/proc/sys/kernel/io_uring_disabled");
  if (!disabled.empty() && disabled != "0") return "; run sysctl -w kernel.io_uring_disabled=0";
  return "; allow io_uring_setup, io_uring_enter and io_uring_register in the seccomp profile of "
         "this container";
}

Finding check_io() {
  Finding finding = {.name = "file I/O"};
  std::string refused;
  for (const aio::Backend& backend : aio::probe_backends()) {
    if (!backend.moves_data) continue;
    if (backend.usable) {
      finding.text = backend.name + refused;
      return finding;
    }
    finding.severity = Severity::hint;
    refused += fmt::format("; faster would be {}, but {}{}", backend.name, backend.reason,
                           io_uring_remedy(backend.reason));
  }
  return {Severity::fault, "file I/O", "no backend is usable" + refused};
}

Finding check_mpi() {
  const std::string refusal = comm::mpi_refusal();
  if (refusal.empty()) return {.name = "MPI", .text = comm::mpi_file()};
  const char* const path = std::getenv("LD_LIBRARY_PATH");
  const bool found = refusal.find("cannot be used") != std::string::npos;
  const std::string other =
      found && path != nullptr && *path != '\0'
          ? fmt::format("; LD_LIBRARY_PATH, which may contain another MPI, is \"{}\"", path)
          : "";
  return {Severity::hint, "MPI", refusal + other + "; only runs with several ranks need it"};
}

void check_gpu(const device::DeviceOptions& options, std::vector<Finding>& findings) {
  if (options.kind == "host") {
    findings.push_back({Severity::good, "GPU", "not used, because ballast.device is \"host\""});
    return;
  }
  try {
    device::require_device(options);
  } catch (const Error& error) {
    findings.push_back({Severity::fault, "GPU", error.what()});
    return;
  }
  if (const std::string refusal = device::gpu_refusal(options); !refusal.empty()) {
    findings.push_back({Severity::good, "GPU", "none: " + refusal});
    return;
  }
  findings.push_back(
      {Severity::good, "GPU",
       fmt::format("{}, {} free; {}", device::gpu_name(options),
                   format_bytes(device::own_memory(options)), device::cuda_requirement())});
  for (const model::CudaLibrary& library : model::cuda_libraries()) {
    // Without cuBLASLt, only plain kernels can use the GPU.
    const bool good = library.refusal.empty();
    const char* const use = library.name == "cuDNN" ? "; attention is faster with it"
                                                    : "; the kernels of ballast.kernels \"auto\" "
                                                      "need it and are ten times as fast";
    findings.push_back({good ? Severity::good : Severity::hint, library.name,
                        good ? library.file : library.refusal + use});
  }
  const std::string nccl = comm::nccl_refusal();
  findings.push_back({nccl.empty() ? Severity::good : Severity::hint, "NCCL",
                      nccl.empty() ? comm::nccl_file()
                                   : nccl + "; only runs on several GPUs need "
                                            "it"});
}

std::string_view word_of(Severity severity) {
  switch (severity) {
    case Severity::good:
      return "ok";
    case Severity::hint:
      return "hint";
    case Severity::fault:
      break;
  }
  return "fault";
}

/// Size of the largest file of a run of one rank: its weights, or the states in a swap file.
Bytes largest_file(const config::Config& config) {
  constexpr Bytes kWeight = 4;  // saved weights are fp32
  const config::BallastSection& ballast = config.ballast;
  const Elems trained = setup::model_of(config).trained_parameters();
  Bytes largest = ballast.save_weights ? kWeight * trained : 0;
  if (config.zero.optimizer.tier == Tier::nvme) {
    const Bytes states = ballast.optimizer_states == cpu_adam::Moments::Format::f32 ? 10 : 4;
    const Bytes copies = ballast.writes_checkpoints() ? ballast.checkpoint_keep + 1 : 1;
    largest =
        std::max(largest, copies * states * trained / setup::swap_options(config, {}).paths.size());
  }
  return largest;
}

MachineUse use_of(const config::Config& config) {
  const auto number = [](int threads) { return threads > 0 ? threads : usable_cpus(); };
  return {
      .device = setup::device_options(config),
      .swap = setup::swap_options(config, {}),
      .run_directory = config.ballast.out,
      .largest_file = largest_file(config),
      .threads = number(config.ballast.compute_threads) + number(config.ballast.update_threads)};
}

void print(const std::vector<Finding>& findings, std::size_t& faults) {
  for (const Finding& finding : findings) {
    fmt::print("{:<14} {:<5} {}\n", finding.name, word_of(finding.severity), finding.text);
    faults += finding.severity == Severity::fault ? 1U : 0U;
  }
  std::fflush(stdout);
}

/// Without a config, looks at the current folder as an example.
void run_doctor(const ConfigRequest& request) {
  std::size_t faults = 0;
  if (request.file.empty()) {
    print(examine_machine({.swap = {.paths = {{.directory = "."}}, .any_file_system = true}}),
          faults);
  } else {
    constexpr std::uint32_t kUnknownRanks = 0;
    const config::Config config = request.load(kUnknownRanks);
    print(examine_machine(use_of(config)), faults);
    if (faults == 0 && device::kind_of(setup::device_options(config)) == "cuda") {
      print(examine_gpu(config), faults);
    }
  }
  if (faults == 0) return;
  throw Error(ErrorCategory::device,
              fmt::format("{} check{} of this machine failed", faults, faults == 1 ? "" : "s"));
}

}  // namespace

std::string cpu_flags(const std::vector<std::string_view>& wanted, const fs::path& root) {
  std::ifstream file(root / "proc/cpuinfo");
  std::string flags;
  for (std::string line; flags.empty() && std::getline(file, line);) {
    if (line.starts_with("flags") || line.starts_with("Features")) flags = line;
  }
  std::vector<std::string> all;
  std::istringstream words(flags);
  for (std::string word; words >> word;) all.push_back(word);
  std::string found;
  for (const std::string_view flag : wanted) {
    if (std::find(all.begin(), all.end(), flag) == all.end()) continue;
    found += found.empty() ? "" : " ";
    found += flag;
  }
  return found;
}

std::vector<Finding> examine_machine(const MachineUse& use) {
  std::vector<Finding> findings = {check_cpu(), check_instructions(), check_free_memory()};
  const auto add = [&](std::vector<Finding> more) {
    findings.insert(findings.end(), more.begin(), more.end());
  };
  add(examine_limits(use));
  findings.push_back(check_huge_pages());
  findings.push_back(check_io());
  add(examine_folders(use));
  findings.push_back(check_mpi());
  check_gpu(use.device, findings);
  return findings;
}

void add_doctor(Command program) {
  auto request = std::make_shared<ConfigRequest>();
  Command command = program.add_command(
      "doctor", "Check this machine: CPU, memory, I/O, MPI, the GPU and its libraries");
  command.add_option("CONFIG", &request->file,
                     "JSON config, for its swap folders and device. On a GPU its model is checked",
                     {.takes = Names::file, .extensions = {".json"}});
  command.add_option("--set", &request->overrides, "Override a key: path.to.key=value",
                     {.single_argument = true, .takes = Names::setting});
  command.set_action([request] { run_doctor(*request); });
}

}  // namespace ballast::tools
