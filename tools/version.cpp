#include <string>
#include <vector>

#include <fmt/format.h>

#include "ballast/aio/queue.h"
#include "ballast/comm/communicator.h"
#include "ballast/core/build_info.h"
#include "ballast/core/cpu.h"
#include "ballast/cpu_adam/updater.h"
#include "ballast/memory/topology.h"

#include "tools/commands.h"

namespace ballast::tools {

void print_version() {
  fmt::print("ballast {}\n", version());
  fmt::print("  {:<17} host; cuda: not built in\n", "devices");
  fmt::print("  {:<17} {}: not built in\n", "communicators",
             comm::mpi_refusal().empty() ? "self, mpi; nccl" : "self; mpi, nccl");
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
