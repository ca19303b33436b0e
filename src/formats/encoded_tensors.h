#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "ballast/core/units.h"
#include "ballast/formats/model_folder.h"
#include "ballast/formats/stored_weights.h"

#include "src/formats/fp8.h"

// Weights that are written in the quantised form that their folder had.

namespace ballast::formats {

/// A quantised tensor to write: its codes and scales.
struct EncodedTensor {
  QuantizedWeights::Format format = QuantizedWeights::Format::fp8;  ///< fp8 or mxfp4
  std::string codes;                                                ///< names of the tensors
  std::string scales;
  fp8::ScaleForm form = {};          ///< form of the scales, only for fp8
  std::vector<std::uint64_t> shape;  ///< shape of the weights: [rows, columns], or for mxfp4
                                     ///< [matrices, in, out]
};

/// Error of quantised weights against the weights that were quantised.
struct CodesError {
  std::size_t tensors = 0;
  double squares = 0.0;  ///< sum over all weights
  double errors = 0.0;   ///< sum of the squares of all differences
  double largest = 0.0;  ///< largest difference, relative to the largest weight of its block

  /// Root of the mean square of the differences, relative to that of the weights.
  [[nodiscard]] double relative_rms() const;
};

/// Reads fp32 weights from element `first` on, in ascending order.
using ReadValues = std::function<void(Elems first, std::span<float> out)>;

/// Quantises the weights that `read` returns to the nearest codes and writes codes and scales. Adds
/// to `error`. Calls `count` with the number of bytes before it writes them. Keeps 128 rows of a
/// matrix in memory, for MXFP4 32 rows and the codes of one matrix of a stack.
void write_encoded(const EncodedTensor& tensor, const ReadValues& read, ModelFolderWriter& writer,
                   const std::function<void(Bytes bytes)>& count, CodesError& error);

}  // namespace ballast::formats
