#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "ballast/plan/plan.h"

namespace ballast::plans {

// The names in dumps of plans. They do not change when the program's own names or its division of
// actions and roles change: this file then translates, so that dumps of two commits can be
// compared.

std::string action_name(const plan::Operation& operation);
std::string role_name(const plan::Operation& operation, const plan::Use& use);
/// The uses, sorted by the name of their role. Several uses in one role, such as tiles of the
/// output matrix, keep their order.
std::vector<plan::Use> uses_by_role(const plan::Operation& operation);
std::string_view lane_name(plan::Lane lane);
/// "in_step, any rank"
std::string condition_name(const plan::Condition& condition);

/// The names of buffers by id. Gradient accumulators and rows between tiles are numbered by their
/// first use in `plans`, independent of their names.
std::vector<std::string> buffer_names(const std::vector<plan::Buffer>& buffers,
                                      const std::vector<const plan::Plan*>& plans);

/// The plan in a normal order. For a tied vocabulary in several tiles, the accumulators of the
/// final norm are cleared directly before the loss, after the gradients of all tiles.
plan::Plan in_normal_order(const plan::Plan& plan);

}  // namespace ballast::plans
