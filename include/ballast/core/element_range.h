#pragma once

#include "ballast/core/units.h"

namespace ballast {

/// The elements [first, end) of an array.
struct ElementRange {
  Elems first = 0;
  Elems end = 0;
  [[nodiscard]] Elems count() const { return end - first; }
};

}  // namespace ballast
