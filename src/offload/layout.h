#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"
#include "ballast/core/view.h"
#include "ballast/cpu_adam/optimizer.h"
#include "ballast/cpu_adam/shard.h"

#include "src/offload/masters.h"

namespace ballast::offload {

/// A parameter whose states are kept.
struct Parameter {
  Elems elements = 0;
  DType type = DType::f32;  ///< type of the weights
  /// Number of its first element, a multiple of Codes::kBlock, on which stochastic rounding
  /// depends. Unset: the first multiple after the preceding parameter.
  std::optional<Elems> first_element = std::nullopt;
};

/// Elements [first, first + count) of a parameter, whose states are in one sub-group.
struct ParameterPart {
  std::size_t parameter = 0;
  Elems first = 0;
  Elems count = 0;
  Bytes offset = 0;  ///< offset of its states in the sub-group
};

/// The unit of memory and transfer: states that are fetched, updated and written back together.
struct OffloadSubGroup {
  std::vector<ParameterPart> parts;
  Bytes bytes = 0;  ///< in whole pages
};

/// Layout of the optimizer states of some parameters. Each part has consecutive arrays: the
/// remainder and check values of bf16 weights or the fp32 master of fp16 weights, the moments, and
/// their shared exponents if they are Codes. The caller owns weights and gradients.
class OffloadLayout {
 public:
  /// `largest`: maximum elements per sub-group, a multiple of Codes::kBlock.
  OffloadLayout(cpu_adam::Optimizer optimizer, cpu_adam::Moments::Format moments,
                const std::vector<Parameter>& parameters, Elems largest);

  /// Appends parameters in new sub-groups. Existing ones keep their places.
  void add(const std::vector<Parameter>& parameters);

  [[nodiscard]] cpu_adam::Optimizer optimizer() const { return optimizer_; }
  [[nodiscard]] cpu_adam::Moments::Format moments() const { return moments_; }
  [[nodiscard]] const std::vector<Parameter>& parameters() const { return parameters_; }
  [[nodiscard]] const std::vector<OffloadSubGroup>& sub_groups() const { return sub_groups_; }
  /// Returns the sub-group of the parameter's first element. The other elements follow in order.
  [[nodiscard]] std::size_t first_sub_group(std::size_t parameter) const {
    return first_sub_groups_.at(parameter);
  }
  [[nodiscard]] Bytes bytes() const;

  /// Returns the arrays of a part for an update. `states`: its sub-group. `weights`: all weights of
  /// the parameter, in its type; may be null if only the moments are used. `gradient`: gradient of
  /// the whole parameter.
  [[nodiscard]] PartStates part_states(const ParameterPart& part, HostBytes states, void* weights,
                                       const cpu_adam::Gradient& gradient) const;

 private:
  /// Offsets of a part's arrays, relative to its own.
  struct Arrays {
    Bytes remainder_or_copy = 0;
    Bytes checks = 0;
    Bytes first = 0;
    Bytes second = 0;
    Bytes first_exponents = 0;
    Bytes second_exponents = 0;
    Bytes end = 0;
  };
  [[nodiscard]] Arrays arrays(DType type, Elems count) const;
  void add_parts(std::size_t parameter, Elems& free);

  cpu_adam::Optimizer optimizer_;
  cpu_adam::Moments::Format moments_;
  Elems largest_;
  std::vector<Parameter> parameters_;
  std::vector<Elems> first_elements_;  ///< number of each parameter's first element, for rounding
  std::vector<std::size_t> first_sub_groups_;
  std::vector<OffloadSubGroup> sub_groups_;
};

}  // namespace ballast::offload
