#pragma once

#include <string>

#include "src/planning/search.h"

namespace ballast::planning {

/// One line for a question without an answer: which tier, by how much, the largest line of its
/// ledger, and the smallest changes of the config that would make it fit, found by trying.
std::string explain_refusal(const Question& question);

}  // namespace ballast::planning
