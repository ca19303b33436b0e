#include "ballast/schedule/plan.h"

#include <algorithm>

#include <fmt/format.h>

namespace ballast::schedule {
namespace {

/// The part of a message that identifies one operation of an action.
enum class Subject : std::uint8_t { none, micro_batch, block, sub_group, block_and_micro_batch };

struct Traits {
  Action action;
  std::string_view name;
  Lane lane;
  Subject subject = Subject::block;
  bool grows_with_batch = false;
};

constexpr auto kMicro = Subject::micro_batch;
constexpr auto kGroup = Subject::sub_group;
constexpr auto kBlockAndMicro = Subject::block_and_micro_batch;

/// Indexed by action.
constexpr Traits kActions[] = {
    {Action::upload_batch, "upload batch", Lane::upload, kMicro, true},
    {Action::fetch_weights, "fetch weights", Lane::fetch},
    {Action::upload_weights, "upload weights", Lane::upload},
    {Action::gather_weights, "gather weights", Lane::gather},
    {Action::decode_weights, "decode weights", Lane::compute},
    {Action::normalize, "norm", Lane::compute, kBlockAndMicro, true},
    {Action::route, "router", Lane::compute, kBlockAndMicro, true},
    {Action::gather_routing, "gather routing", Lane::gather, kBlockAndMicro, true},
    {Action::offload_routing, "offload routing", Lane::offload, kBlockAndMicro, true},
    {Action::forward, "forward", Lane::compute, kBlockAndMicro, true},
    {Action::evaluate_head, "forward", Lane::compute, kBlockAndMicro, true},
    {Action::train_head, "forward and backward", Lane::compute, kBlockAndMicro, true},
    {Action::scan_head, "sums of logits", Lane::compute, kBlockAndMicro, true},
    {Action::differentiate_head, "backward of logits", Lane::compute, kBlockAndMicro, true},
    {Action::end_head, "loss", Lane::compute, kBlockAndMicro, true},
    {Action::offload_activation, "offload activation", Lane::offload, kBlockAndMicro, true},
    {Action::writeback_activation, "writeback activation", Lane::writeback, kBlockAndMicro, true},
    {Action::fetch_activation, "fetch activation", Lane::fetch, kBlockAndMicro, true},
    {Action::upload_activation, "upload activation", Lane::upload, kBlockAndMicro, true},
    {Action::clear_gradient, "clear gradient", Lane::compute},
    {Action::backward, "backward", Lane::compute, kBlockAndMicro, true},
    {Action::pack_gradient, "pack gradient", Lane::compute},
    {Action::reduce_gradient, "reduce gradient", Lane::reduce},
    {Action::offload_gradient, "offload gradient", Lane::offload},
    {Action::writeback_gradient, "writeback gradient", Lane::writeback},
    {Action::fetch_gradient, "fetch gradient", Lane::fetch},
    {Action::offload_statistics, "offload statistics", Lane::offload},
    {Action::offload_losses, "offload losses", Lane::offload, Subject::none, true},
    {Action::gate, "gate", Lane::update, Subject::none},
    {Action::fetch_states, "fetch states", Lane::fetch, kGroup},
    {Action::upload_states, "upload states", Lane::upload, kGroup},
    {Action::offload_weights, "offload weights", Lane::offload},
    {Action::offload_states, "offload states", Lane::offload, kGroup},
    {Action::update_on_host, "update", Lane::update, kGroup},
    {Action::update_on_device, "update on the device", Lane::compute, kGroup},
    {Action::writeback_weights, "writeback weights", Lane::writeback},
    {Action::writeback_states, "writeback states", Lane::writeback, kGroup},
    {Action::initialize, "initialization", Lane::update},
    {Action::read, "reading", Lane::update}};

constexpr bool in_order() {
  std::size_t number = 0;
  for (const Traits& traits : kActions) {
    if (static_cast<std::size_t>(traits.action) != number++) return false;
  }
  return number == static_cast<std::size_t>(Action::read) + 1;
}
static_assert(in_order());

const Traits& traits(Action action) {
  return kActions[static_cast<std::size_t>(action)];
}

}  // namespace

std::string_view to_string(Lane lane) noexcept {
  constexpr std::array<std::string_view, kLaneCount> kNames = {
      "compute", "upload", "offload", "gather", "reduce", "update", "fetch", "writeback"};
  return kNames[static_cast<std::size_t>(lane)];
}

std::string_view to_string(Action action) noexcept {
  return traits(action).name;
}

Lane lane_of(Action action) noexcept {
  return traits(action).lane;
}

bool grows_with_batch(Action action) noexcept {
  return traits(action).grows_with_batch;
}

std::string_view to_string(Kind kind) noexcept {
  constexpr std::array<std::string_view, 11> kNames = {
      "weights",       "optimizer states", "gradients", "accumulators", "activations",
      "intermediates", "staging",          "batch",     "workspace",    "undo",
      "checkpoints"};
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

Bytes BlockWork::state_bytes() const {
  Bytes sum = 0;
  for (const SubGroup& group : sub_groups) sum += group.state_bytes;
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
  const Traits& action = traits(operation.action);
  switch (action.subject) {
    case Subject::none:
      break;
    case Subject::micro_batch:
      return fmt::format("{}, micro-batch {}", action.name, operation.micro);
    case Subject::block:
      return fmt::format("{} of {}", action.name, workload.blocks[operation.block].name);
    case Subject::sub_group: {
      const BlockWork& block = workload.blocks[operation.block];
      if (block.sub_groups.size() < 2) return fmt::format("{} of {}", action.name, block.name);
      return fmt::format("{} of {}, sub-group {}", action.name, block.name, operation.sub_group);
    }
    case Subject::block_and_micro_batch:
      return fmt::format("{} of {}, micro-batch {}{}", action.name,
                         workload.blocks[operation.block].name, operation.micro,
                         operation.reference ? " of the reference" : "");
  }
  return std::string(action.name);
}

}  // namespace ballast::schedule
