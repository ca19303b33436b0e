#pragma once

#include <cstdint>
#include <vector>

#include "ballast/model/step_program.h"

namespace ballast::step {

/// Returns the stops of a list that belong to one form of the head.
std::vector<const model::Stop*> stops_of(const std::vector<model::Stop>& stops,
                                         model::HeadForm form);

/// Returns whether an operand is a copy in host memory, which readers of a routing use.
bool is_on_host(const model::StepProgram& program, const model::Operand& operand);

/// Assigns colours to values of SlotRule::own and to gradient sums: those with the same colour
/// share a buffer.
///
/// A life is an interval of stops, with all recipes expanded. Values of a class whose lives do not
/// overlap have the same colour. Colours depend on the program and the form of the head, but not on
/// a placement: they are computed as if nothing were kept.
struct Colours {
  std::vector<std::uint32_t> of_value;  ///< kNone: no pass uses it
  // By class: number of colours in a training step and in an evaluation.
  std::vector<std::uint32_t> training;
  std::vector<std::uint32_t> evaluation;
  /// By sum, if all micro-batches pass a stop before the next stop; kNone: no pass adds to it.
  std::vector<std::uint32_t> of_sum;
  std::uint32_t sums = 0;  ///< number of colours of sums
};

/// `trains`: for training steps and evaluations, otherwise only for evaluations.
Colours colour(const model::StepProgram& program, model::HeadForm form, bool trains);

}  // namespace ballast::step
