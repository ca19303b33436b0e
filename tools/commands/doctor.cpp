#include "tools/commands/doctor.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>

#include <fmt/format.h>
#include <sys/resource.h>

#include "ballast/aio/file_system.h"
#include "ballast/aio/queue.h"
#include "ballast/comm/communicator.h"
#include "ballast/core/cpu.h"
#include "ballast/core/error.h"
#include "ballast/core/units.h"
#include "ballast/inputs/engine_inputs.h"
#include "ballast/memory/budget.h"
#include "ballast/memory/topology.h"
#include "ballast/model/compute.h"
#include "ballast/model/cuda_libraries.h"

#include "tools/command_line.h"
#include "tools/commands.h"
#include "tools/commands/request.h"
#include "tools/process.h"

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
  return {.name = "memory",
          .text = fmt::format("{} available", format_bytes(memory::available_memory()))};
}

/// io_uring registers the buffers of transfers, which the kernel counts as locked memory.
Finding check_locked_memory() {
  constexpr Bytes kEnough = 8 * kGiB;
  rlimit limit = {};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return {.name = "locked memory", .text = "unknown"};
  const bool unlimited = limit.rlim_cur == RLIM_INFINITY;
  Finding finding = {
      .name = "locked memory",
      .text = unlimited ? "unlimited" : format_bytes(Bytes{limit.rlim_cur}) + " (ulimit -l)"};
  if (unlimited || limit.rlim_cur >= kEnough) return finding;
  finding.severity = Severity::hint;
  finding.text +=
      "; transfers to and from NVMe are faster if their buffers may be locked: "
      "ulimit -l unlimited, or memlock in /etc/security/limits.conf";
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

Finding check_swap_folder(const fs::path& folder, bool any_file_system) {
  constexpr Bytes kLittle = 10 * kGiB;
  Finding finding = {.name = "swap folder"};
  try {
    const aio::FileSystem system = aio::inspect_file_system(folder);
    finding.text = fmt::format("{}: {}, {} free", folder.string(), system.type,
                               system.free ? format_bytes(*system.free) : "unknown space");
    if (const std::string why = aio::unsuited_for_swap(system, folder); !why.empty()) {
      finding.severity = any_file_system ? Severity::hint : Severity::fault;
      finding.text = why;
    } else if (system.free == Bytes{0}) {
      finding.severity = Severity::fault;
      finding.text += "; nothing can be swapped or saved there: free some space";
    } else if (system.free && *system.free < kLittle) {
      finding.severity = Severity::hint;
      finding.text += "; optimizer states need 12 bytes per parameter";
    }
  } catch (const Error& error) {
    finding.severity = Severity::fault;
    finding.text = error.what();
  }
  return finding;
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

MachineUse use_of(const config::Config& config) {
  MachineUse use = {.device = inputs::device_options(config),
                    .any_file_system = config.aio.any_file_system};
  for (const auto& path : inputs::swap_options(config, {}).paths) {
    if (!path.made_later) use.swap_folders.push_back(path.directory);
  }
  return use;
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
    print(examine_machine({.swap_folders = {"."}, .any_file_system = true}), faults);
  } else {
    constexpr std::uint32_t kUnknownRanks = 0;
    const config::Config config = request.load(kUnknownRanks);
    print(examine_machine(use_of(config)), faults);
    if (faults == 0 && device::kind_of(inputs::device_options(config)) == "cuda") {
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
  std::vector<Finding> findings = {check_cpu(),           check_instructions(), check_free_memory(),
                                   check_locked_memory(), check_huge_pages(),   check_io()};
  for (const fs::path& folder : use.swap_folders) {
    findings.push_back(check_swap_folder(folder, use.any_file_system));
  }
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
