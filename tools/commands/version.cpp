#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "ballast/aio/queue.h"
#include "ballast/comm/communicator.h"
#include "ballast/core/machine.h"
#include "ballast/cpu_adam/updater.h"
#include "ballast/device/device.h"
#include "ballast/memory/machine.h"
#include "ballast/model/cuda_libraries.h"

#include "tools/command_line.h"

namespace ballast::tools {
namespace {

/// A part of the program that may be missing on a machine.
struct OptionalPart {
  std::string name;
  std::string refusal;      ///< reason why it is missing, or ""
  std::string detail = {};  ///< file of the loaded library or required driver, if any
};

/// Returns "self, mpi (/usr/lib/ballast/ballast_mpi.so); nccl: built without NCCL".
std::string parts_text(const std::vector<OptionalPart>& parts) {
  std::string available;
  std::string missing;
  for (const OptionalPart& part : parts) {
    if (!part.refusal.empty()) {
      missing += fmt::format("; {}: {}", part.name, part.refusal);
      continue;
    }
    available += fmt::format("{}{}", available.empty() ? "" : ", ", part.name);
    if (!part.detail.empty()) available += fmt::format(" ({})", part.detail);
  }
  return available.empty() ? missing.substr(std::min<std::size_t>(2, missing.size()))
                           : available + missing;
}

}  // namespace

void print_version() {
  fmt::print("ballast {}\n", version());
  fmt::print("  {:<17} {}\n", "devices",
             parts_text({{"host", ""},
                         {"cuda", device::cuda_built_in() ? "" : "not built in",
                          device::cuda_requirement()}}));
  if (const std::string code = device::gpu_code(); !code.empty()) {
    fmt::print("  {:<17} machine code for {}; newer GPUs compile PTX at the first start\n",
               "GPU kernels", code);
  }
  fmt::print("  {:<17} {}\n", "communicators",
             parts_text({{"self", ""},
                         {"mpi", comm::mpi_refusal(), comm::mpi_file()},
                         {"nccl", comm::nccl_refusal(), comm::nccl_file()}}));
  std::vector<OptionalPart> libraries;
  for (const auto& library : model::cuda_libraries()) {
    libraries.push_back({library.name, library.refusal, library.file});
  }
  if (!libraries.empty()) fmt::print("  {:<17} {}\n", "libraries", parts_text(libraries));
  std::string backends;
  for (const auto& backend : aio::probe_backends()) {
    if (!backend.moves_data) continue;
    if (!backends.empty()) backends += "; ";
    backends += backend.name;
    if (!backend.usable) backends += " (refused: " + backend.reason + ")";
  }
  fmt::print("  {:<17} {}\n", "I/O backends", backends);
  std::string isas;
  for (const Isa isa : cpu_adam::available()) {
    isas += fmt::format("{}{}", isas.empty() ? "" : " ", to_string(isa));
  }
  fmt::print("  {:<17} {} (update uses {})\n", "instruction sets", isas,
             to_string(cpu_adam::active()));
  fmt::print("  {:<17} {}, {}\n", "machine", cpu_name(), memory::describe(memory::read_topology()));
}

}  // namespace ballast::tools
