#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"
#include "ballast/formats/model_folder.h"
#include "ballast/formats/weight_files.h"

#include "src/formats/encoded_tensors.h"
#include "src/formats/merged_adapters.h"

namespace ballast::formats {

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
