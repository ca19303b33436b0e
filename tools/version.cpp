#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "ballast/aio/queue.h"
#include "ballast/comm/communicator.h"
#include "ballast/core/build_info.h"
#include "ballast/core/cpu.h"
#include "ballast/cpu_adam/updater.h"
#include "ballast/device/device.h"
#include "ballast/memory/topology.h"

#include "tools/commands.h"

namespace ballast::tools {
namespace {

struct Part {
  std::string_view name;
  bool available;
};

/// "self, mpi; nccl: not built in".
std::string built_in(const std::vector<Part>& parts) {
  std::string available;
  std::string missing;
  for (const Part& part : parts) {
    std::string& list = part.available ? available : missing;
    list += fmt::format("{}{}", list.empty() ? "" : ", ", part.name);
  }
  return missing.empty() ? available : available + "; " + missing + ": not built in";
}

}  // namespace

void print_version() {
  fmt::print("ballast {}\n", version());
  fmt::print("  {:<17} {}\n", "devices",
             built_in({{"host", true}, {"cuda", device::cuda_built_in()}}));
  fmt::print("  {:<17} {}\n", "communicators",
             built_in({{"self", true},
                       {"mpi", comm::mpi_refusal().empty()},
                       {"nccl", comm::nccl_refusal().empty()}}));
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
