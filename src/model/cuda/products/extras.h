#pragma once

namespace ballast::model::cuda {

/// Additional operands of a product, aligned like matrices.
struct Extras {
  const void* addend = nullptr;  ///< [m, n], added; d or another matrix with the layout of d
  const void* bias = nullptr;    ///< [n], in the type of a and d, added to every row
};

}  // namespace ballast::model::cuda
