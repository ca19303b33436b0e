#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "ballast/schedule/plan.h"

namespace ballast::plans {

// The names in dumps of plans. They stay as they are when the program's own names or its division
// of actions and roles change: this file then translates, so that dumps of two commits can be
// compared.

std::string_view action_name(const schedule::Operation& operation);
std::string_view role_name(const schedule::Operation& operation, const schedule::Use& use);
/// The uses by the name of their role. Several in one role, such as tiles of the output matrix,
/// keep their order.
std::vector<schedule::Use> uses_by_role(const schedule::Operation& operation);
std::string_view lane_name(schedule::Lane lane);
/// "in_step, any rank"
std::string condition_name(const schedule::Condition& condition);

/// The names of buffers by id. Gradient accumulators and rows between tiles are numbered by their
/// first use in `plans`, whatever they are called.
std::vector<std::string> buffer_names(const std::vector<schedule::Buffer>& buffers,
                                      const std::vector<const schedule::Plan*>& plans);

/// The plan in a normal order. For a tied vocabulary in several tiles, the accumulators of the
/// final norm are cleared directly before the loss, after the gradients of all tiles.
schedule::Plan in_normal_order(const schedule::Plan& plan);

}  // namespace ballast::plans
