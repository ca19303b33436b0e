#pragma once

#include <string>
#include <vector>

#include "ballast/model/step_program.h"

namespace ballast::model {

/// The program as text, one line per stop, pass and operand: for golden files and people.
std::string to_text(const StepProgram& program);

/// Checks the program and returns one line per broken rule. A read follows a write of the same
/// life. Outside of recipes, one pass writes a value and all others update it, so several passes
/// can add to a gradient. A recipe writes its value and reads only values that are placed, kept
/// with a recipe, or made by the recipe. Only optional operands have a cost of absence. `finishes`
/// lists each block from the head down to first_differentiated once. A block with rows follows the
/// pass that writes its routing.
std::vector<std::string> check(const StepProgram& program);

}  // namespace ballast::model
