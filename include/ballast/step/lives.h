#pragma once

#include <cstdint>
#include <vector>

#include "ballast/model/step_program.h"

namespace ballast::step {

/// The stops of a list that belong to one form of the head.
std::vector<const model::Stop*> stops_of(const std::vector<model::Stop>& stops,
                                         model::HeadForm form);

/// Whether an operand is a copy in host memory: who reads a routing reads that.
bool is_on_host(const model::StepProgram& program, const model::Operand& operand);

/// Which values of SlotRule::own, and which gradient sums, share a buffer.
///
/// A life is an interval of stops, with all recipes written out. Values of a class whose lives do
/// not overlap have the same colour. Colours depend on the program and on the form of the head, not
/// on a placement: they are computed as if nothing were kept.
struct Colours {
  std::vector<std::uint32_t> of_value;  ///< kNone: no pass uses it
  // By class: the number of colours that are used in a training step and in an evaluation.
  std::vector<std::uint32_t> training;
  std::vector<std::uint32_t> evaluation;
  /// By sum, if all micro-batches go through a stop before the next stop; kNone: no pass adds to
  /// it.
  std::vector<std::uint32_t> of_sum;
  std::uint32_t sums = 0;  ///< number of colours of sums
};

/// `trains`: for training steps and evaluations, else for evaluations alone.
Colours colour(const model::StepProgram& program, model::HeadForm form, bool trains);

}  // namespace ballast::step
