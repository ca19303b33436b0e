#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "ballast/core/dtype.h"
#include "ballast/core/memory.h"
#include "ballast/core/units.h"
#include "ballast/cpu_adam/optimizer.h"

namespace ballast::offload {

// The fp32 masters of 16-bit weights that another program may change. A bf16 master is the weight
// and a 16-bit remainder. The check values of the weights that the remainders belong to show later
// which weights were changed, so that weights which were changed and put back keep their masters.
// An fp16 master is complete, and each weight is compared with its rounded master. fp32 weights
// have no master. `first` is a multiple of cpu_adam::WeightChecks::kBlock, and `count` too except
// at the end of a part.

/// The arrays of a part: those of an update, and the check values of bf16 weights.
struct PartStates {
  cpu_adam::Shard shard;
  /// WeightChecks::values_of(shard.size) values; null for other types.
  std::uint16_t* checks = nullptr;
};

/// Elements [first, first + count) of `states`.
PartStates part_of(const PartStates& states, Elems first, Elems count);

/// Makes weights that were changed the master. A changed bf16 weight also clears the remainders of
/// the other weights with the same check value.
void follow_weights(const PartStates& states, Elems first, Elems count);

/// Notes that the present weights belong to the master.
void note_weights(const PartStates& states, Elems first, Elems count);

/// Makes the weights at the next follow_weights() the master.
void forget_master(const PartStates& states);

/// Copies the master out, with the weights where they were changed. Changes nothing.
void read_master(const PartStates& states, std::span<float> out);

/// Whether a new master also sets the weights, or leaves them: then it becomes the master of
/// weights that equal its rounded values when they are next compared.
enum class NewMaster : std::uint8_t { sets_weights, awaits_weights };

/// Copies a master in.
void write_master(const PartStates& states, std::span<const float> values, NewMaster mode);

/// Copies the master of one part to a part of the same type and size, without its weights.
void copy_master(const PartStates& from, const PartStates& to);

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
