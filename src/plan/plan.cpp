#include "ballast/plan/plan.h"

#include <algorithm>

namespace ballast::plan {
namespace {

struct Traits {
  Action action;
  std::string_view name;
  Lane lane;
};

/// Indexed by action.
constexpr std::array<Traits, kActionCount> kActions = {
    {{Action::compute, "compute", Lane::compute},
     {Action::decode, "decode", Lane::compute},
     {Action::clear, "clear", Lane::compute},
     {Action::pack, "pack", Lane::compute},
     {Action::upload, "upload", Lane::upload},
     {Action::offload, "offload", Lane::offload},
     {Action::fetch, "fetch", Lane::fetch},
     {Action::writeback, "writeback", Lane::writeback},
     {Action::gather, "gather", Lane::gather},
     {Action::reduce, "reduce", Lane::reduce},
     {Action::gate, "gate", Lane::update},
     {Action::update, "update", Lane::update},
     {Action::update_on_device, "update on the device", Lane::compute},
     {Action::initialize, "initialization", Lane::update},
     {Action::read, "reading", Lane::update},
     {Action::select, "select", Lane::update},
     {Action::scatter, "scatter", Lane::update},
     {Action::transfer, "pass", Lane::peer},
     {Action::keep, "keep", Lane::compute},
     {Action::exchange, "exchange", Lane::reduce}}};

constexpr bool in_order() {
  std::size_t number = 0;
  for (const Traits& traits : kActions) {
    if (static_cast<std::size_t>(traits.action) != number++) return false;
  }
  return number == kActionCount;
}
static_assert(in_order());

const Traits& traits(Action action) {
  return kActions[static_cast<std::size_t>(action)];
}

}  // namespace

std::string_view to_string(Lane lane) noexcept {
  constexpr std::array<std::string_view, kLaneCount> kNames = {
      "compute", "upload", "offload", "gather", "reduce", "update", "fetch", "writeback", "pass"};
  return kNames[static_cast<std::size_t>(lane)];
}

std::string_view to_string(Action action) noexcept {
  return traits(action).name;
}

std::string_view to_string(Payload payload) noexcept {
  constexpr std::array<std::string_view, 6> kNames = {"",         "weights",    "states",
                                                      "gradient", "statistics", "value"};
  return kNames[static_cast<std::size_t>(payload)];
}

Lane lane_of(Action action) noexcept {
  return traits(action).lane;
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

std::array<Bytes, kLaneCount> Plan::bytes_by_lane() const {
  std::array<Bytes, kLaneCount> sums{};
  for (const Operation& operation : operations) {
    sums[static_cast<std::size_t>(operation.lane)] += operation.bytes;
  }
  return sums;
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

}  // namespace ballast::plan
