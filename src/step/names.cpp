#include "ballast/step/names.h"

#include <array>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "ballast/step/labels.h"

#include "src/step/plan_types.h"

namespace ballast::step {
namespace {

/// Returns the word for the data that an operation moves.
std::string_view object_of(const Operation& operation) {
  constexpr std::array<std::string_view, 7> kValues = {
      "batch", "activation", "routing", "losses", "rows", "gradient of rows", "gradient sum"};
  return operation.payload == Payload::value ? kValues.at(operation.label)
                                             : to_string(operation.payload);
}

}  // namespace

std::string OperationNames::kind_of(const Operation& operation) {
  switch (operation.action) {
    case Action::compute:
    case Action::exchange:
      return std::string(model::work_of(kernel_of(operation)));
    case Action::gate:
    case Action::update:
    case Action::update_on_device:
    case Action::initialize:
    case Action::read:
      return std::string(to_string(operation.action));
    default:
      return fmt::format("{} {}", to_string(operation.action), object_of(operation));
  }
}

std::string OperationNames::operator()(const Operation& operation) const {
  const std::string action = kind_of(operation);
  const bool initial = operation.action == Action::initialize || operation.action == Action::read;
  if (operation.action == Action::gate) return action + " (loss, norm, clipping)";
  if (moves(operation, MovedValue::losses)) return action;
  if (moves(operation, MovedValue::batch)) {
    return fmt::format("{}, micro-batch {}", action, operation.micro);
  }
  const std::string& block = block_of(operation);
  if (operation.grows_with_batch() && !initial) {
    return fmt::format("{} of {}, micro-batch {}{}", action, block, operation.micro,
                       is_reference(operation) ? " of the reference" : "");
  }
  const bool of_sub_group = operation.payload == Payload::states ||
                            operation.action == Action::update ||
                            operation.action == Action::update_on_device;
  if (of_sub_group && problem_->blocks[operation.block].sub_groups.size() > 1 && !initial) {
    return fmt::format("{} of {}, sub-group {}", action, block, operation.sub_group);
  }
  return fmt::format("{} of {}", action, block);
}

}  // namespace ballast::step
