#pragma once

#include <span>

#include "ballast/cpu_adam/optimizer.h"
#include "ballast/cpu_adam/shard.h"

namespace ballast::cpu_adam {

/// One element of a shard, decoded to float. A moment that is not kept is 0.
struct Element {
  float weight = 0.0F;  ///< the fp32 master
  float first = 0.0F;
  float second = 0.0F;
  float gradient = 0.0F;
  /// With Codes, the smallest magnitude above 0 that the element's block can hold; otherwise 0.
  float first_smallest = 0.0F;
  float second_smallest = 0.0F;
};

/// Decodes element `index` (< size) of a shard, for checks and inspection; slow. This second
/// implementation of the formats shares no code with the kernels.
Element read_element(Optimizer optimizer, const Shard& shard, Elems index);

/// Copies the moments of a shard to floats, each span `size` long. A span that is empty, or whose
/// moment is not kept, is not changed. Throws Error(state) for another length.
void read_moments(Optimizer optimizer, const Shard& shard, std::span<float> first,
                  std::span<float> second);

/// Sets the moments of a shard from floats, the inverse of read_moments(). Values that a format
/// cannot hold are rounded to nearest; a second moment that is not zero does not become zero.
void write_moments(Optimizer optimizer, const Shard& shard, std::span<const float> first,
                   std::span<const float> second);

/// The error of one update against the same update computed in double: the largest distance of the
/// weight and of the moments, each divided by its bound in README.md. 1 or less is correct. NaN
/// where only one of the two is finite, or neither is and they differ. `before` and `after`
/// are the element before and after Updater::step(hyper, shard) with moments in that format.
double reference_error(const Hyper& hyper, Moments::Format moments, const Element& before,
                       const Element& after);

}  // namespace ballast::cpu_adam
