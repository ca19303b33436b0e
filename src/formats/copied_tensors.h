#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"
#include "ballast/formats/model_folder.h"
#include "ballast/formats/stored_weights.h"
#include "ballast/formats/weight_files.h"

#include "src/formats/adapter_files.h"
#include "src/formats/quantized_matrices.h"

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

/// A tensor of a new folder and its source.
struct CopiedTensor {
  /// With copied_dtype, the bytes of the source are copied. Otherwise its values are converted.
  TensorToStore stored;
  /// Null for scales that are written together with their codes.
  const WeightPlace* source = nullptr;
  /// The values of the source are quantised: `stored` is the tensor of their codes.
  std::optional<EncodedTensor> encoded = {};
  std::string merged = {};  ///< name by which adapters change the values; "" if they do not
};

/// The copy of all bytes of the tensor at `place`, which is not quantised.
CopiedTensor copy_of_bytes(const WeightPlace& place);

/// The tensors as a ModelFolderWriter takes them.
std::vector<TensorToStore> stored_tensors(const std::vector<CopiedTensor>& tensors);

/// Reads the sources, which are in `weights`, ahead and writes the tensors of all `files` in the
/// background, in pieces that stay in a cache. `merged` changes the weights; null: nothing does.
/// Calls `progress` with the bytes written. Returns the error of the tensors that were quantised.
CodesError copy_tensors(const WeightFiles& weights, MergedAdapters* merged,
                        const std::vector<std::vector<CopiedTensor>>& files,
                        ModelFolderWriter& writer, const std::function<void(Bytes done)>& progress);

}  // namespace ballast::formats
