#pragma once

#include <array>
#include <span>
#include <string>
#include <vector>

#include "ballast/core/memory.h"
#include "ballast/cpu_adam/optimizer.h"
#include "ballast/cpu_adam/updater.h"

namespace ballast::tools {

/// A variant of `bench adam`: an optimizer with a layout of its arrays.
struct AdamVariant {
  std::string name;  ///< "<optimizer>-<layout>"
  cpu_adam::Optimizer optimizer;
  cpu_adam::Weights::Format weights;
  DType gradient;
  cpu_adam::Moments::Format moments;
  cpu_adam::Traffic traffic;
};

/// Returns the variant called `name`. Throws Error(usage) that lists optimizers and layouts.
const AdamVariant& find_adam_variant(const std::string& name);

/// The arrays of one update of a variant, filled with plausible values.
class AdamArrays {
 public:
  /// Upper bound of the memory for `size` elements, at most 2^64 - 1.
  static Bytes bytes_needed(const AdamVariant& variant, Elems size);
  /// Largest number of elements that fit in `bytes`.
  static Elems elements_in(const AdamVariant& variant, Bytes bytes);

  /// Allocates with `updater` and fills with its number of threads. Throws Error(memory).
  AdamArrays(const cpu_adam::Updater& updater, const AdamVariant& variant, Elems size);

  [[nodiscard]] const cpu_adam::Shard& shard() const { return shard_; }

  /// Whether the copy of element `index` is the rounded master weight; true if there is no copy.
  [[nodiscard]] bool copy_is_right(Elems index) const;

 private:
  std::vector<Mapping> mappings_;
  cpu_adam::Shard shard_;
};

}  // namespace ballast::tools
