#include "ballast/schedule/plan.h"

#include <algorithm>

#include <fmt/format.h>

namespace ballast::schedule {

std::string_view to_string(Lane lane) noexcept {
  constexpr std::array<std::string_view, kLaneCount> kNames = {
      "compute", "upload", "offload", "gather", "reduce", "update", "fetch", "writeback"};
  return kNames[static_cast<std::size_t>(lane)];
}

std::string_view to_string(Action action) noexcept {
  constexpr std::array<std::string_view, kActionCount> kNames = {"upload batch",
                                                                 "fetch weights",
                                                                 "upload weights",
                                                                 "gather weights",
                                                                 "forward",
                                                                 "forward",
                                                                 "forward and backward",
                                                                 "offload activation",
                                                                 "writeback activation",
                                                                 "fetch activation",
                                                                 "upload activation",
                                                                 "clear gradient",
                                                                 "backward",
                                                                 "pack gradient",
                                                                 "reduce gradient",
                                                                 "offload gradient",
                                                                 "offload statistics",
                                                                 "offload losses",
                                                                 "gate",
                                                                 "fetch states",
                                                                 "offload weights",
                                                                 "update",
                                                                 "update on the device",
                                                                 "writeback weights",
                                                                 "writeback states"};
  return kNames[static_cast<std::size_t>(action)];
}

std::string_view to_string(Kind kind) noexcept {
  constexpr std::array<std::string_view, 9> kNames = {
      "weights",       "optimizer states", "gradients", "accumulators", "activations",
      "intermediates", "staging",          "batch",     "workspace"};
  return kNames[static_cast<std::size_t>(kind)];
}

Use Operation::use(Role role) const {
  const auto found =
      std::find_if(uses.begin(), uses.end(), [role](const Use& use) { return use.role == role; });
  return found == uses.end() ? Use{.role = role} : *found;
}

Bytes Plan::bytes_on(Lane lane) const {
  Bytes sum = 0;
  for (const Operation& operation : operations) {
    if (operation.lane == lane) sum += operation.bytes;
  }
  return sum;
}

double Plan::flops() const {
  double sum = 0.0;
  for (const Operation& operation : operations) sum += operation.flops;
  return sum;
}

Bytes Schedule::bytes(Tier tier) const {
  Bytes sum = 0;
  for (const Buffer& buffer : buffers) {
    if (buffer.tier == tier) sum += buffer.bytes;
  }
  return sum;
}

std::string describe(const Operation& operation, const Workload& workload) {
  std::string text(to_string(operation.action));
  switch (operation.action) {
    case Action::upload_batch:
      return fmt::format("{}, micro-batch {}", text, operation.micro);
    case Action::offload_losses:
    case Action::gate:
      return text;
    case Action::forward:
    case Action::evaluate_head:
    case Action::train_head:
    case Action::backward:
    case Action::offload_activation:
    case Action::upload_activation:
    case Action::writeback_activation:
    case Action::fetch_activation:
      return fmt::format("{} of {}, micro-batch {}", text, workload.blocks[operation.block].name,
                         operation.micro);
    default:
      return fmt::format("{} of {}", text, workload.blocks[operation.block].name);
  }
}

}  // namespace ballast::schedule
