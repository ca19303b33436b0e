#pragma once

#include <string>

#include "src/engine/search.h"

namespace ballast::engine {

/// One line for a question without an answer: which tier, by how much, the largest line of its
/// ledger, and the smallest changes of the config that would make it fit, found by trying.
std::string explain_refusal(const Question& question);

}  // namespace ballast::engine
