#pragma once

#include <cstdint>

#include "ballast/model/step_program.h"
#include "ballast/plan/plan.h"

namespace ballast::step {

// Types that this module writes, and its inputs.
using plan::Action;
using plan::Boundary;
using plan::Buffer;
using plan::BufferId;
using plan::Condition;
using plan::Kind;
using plan::kNoBuffer;
using plan::kNoLabel;
using plan::kNoOp;
using plan::Lane;
using plan::Operation;
using plan::OpId;
using plan::Payload;
using plan::Plan;
using plan::RankGroup;
using plan::Role;
using plan::Schedule;
using plan::Speculation;
using plan::Speed;
using plan::Use;

// Interpretation of the numbers that a plan leaves open: ports, and labels of operations. The step
// writes them, the engine reads them.

/// Returns the role of a buffer that a compute operation binds to `port`.
constexpr plan::Role role_of(model::Port port) {
  return static_cast<plan::Role>(static_cast<unsigned>(plan::Role::first_port) +
                                 static_cast<unsigned>(port));
}

/// The label of an operation with Payload::value.
enum class MovedValue : std::uint8_t {
  batch,
  activation,
  routing,
  losses,
  rows,
  row_gradients,
  gradient_sum
};

constexpr std::uint32_t label_of(MovedValue value) {
  return static_cast<std::uint32_t>(value);
}
constexpr bool moves(const plan::Operation& operation, MovedValue value) {
  return operation.payload == plan::Payload::value && operation.label == label_of(value);
}

// The label of a compute operation is the number of its pass in the step program. The upper bits
// repeat the facts that names and reports need, so that they work without the program.
inline constexpr std::uint32_t kPassBits = 24;
inline constexpr std::uint32_t kReferenceLabel = 1U << 31U;
constexpr std::uint32_t label_of(model::PassId id, const model::Pass& pass) {
  return id | static_cast<std::uint32_t>(pass.kernel) << kPassBits |
         (pass.reference > 0 ? kReferenceLabel : 0);
}
/// Returns the number of the pass that a compute operation runs.
constexpr model::PassId pass_id(const plan::Operation& compute) {
  return compute.label & ((1U << kPassBits) - 1);
}
constexpr model::Kernel kernel_of(const plan::Operation& compute) {
  return static_cast<model::Kernel>((compute.label & ~kReferenceLabel) >> kPassBits);
}
constexpr bool is_reference(const plan::Operation& compute) {
  return compute.action == plan::Action::compute && (compute.label & kReferenceLabel) != 0;
}
constexpr bool runs(const plan::Operation& operation, model::Kernel kernel) {
  return operation.action == plan::Action::compute && kernel_of(operation) == kernel;
}

}  // namespace ballast::step
