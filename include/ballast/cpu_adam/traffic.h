#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "ballast/cpu_adam/optimizer.h"
#include "ballast/cpu_adam/shard.h"

namespace ballast::cpu_adam {

/// The memory traffic of one update, per element. Not counted: the shared exponents of Codes (1/256
/// byte per moment; Updater::touch omits them too) and lines that a cache reads before it
/// overwrites them.
struct Traffic {
  struct Array {
    /// "w" weight or fp32 master, "r" its remainder, "c" a write-only copy, "m" first
    /// moment, "v" second moment or sum of squares, "g" gradient.
    std::string_view name;
    Bytes bytes = 0;  ///< size of one element
    bool read = false;
    bool written = false;
  };

  std::vector<Array> arrays;  ///< arrays that the update uses, in the order of their kernel
  Bytes first_moment = 0;     ///< size of one element; 0 if the update has none
  Bytes second_moment = 0;    ///< size of one element; 0 if the update has none

  /// Bytes of one element of the array called `name`; 0 when the update has none.
  [[nodiscard]] Bytes bytes_of(std::string_view name) const;
  /// Bytes read plus bytes written.
  [[nodiscard]] Bytes bytes_per_element() const;
  /// Bytes of memory that the arrays take, per element.
  [[nodiscard]] Bytes stored_per_element() const;
  /// "read w2 r2 m4 v4 g2 + write w2 r2 m4 v4 = 26 bytes/parameter".
  [[nodiscard]] std::string formula() const;
};

/// The traffic of an update with these formats: the same arrays that Updater::step walks through.
Traffic traffic(Optimizer optimizer, Weights::Format weights, DType gradient,
                Moments::Format moments);

}  // namespace ballast::cpu_adam
