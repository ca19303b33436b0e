#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"
#include "ballast/formats/model_folder.h"
#include "ballast/formats/weight_files.h"

#include "src/formats/merged_adapters.h"

namespace ballast::formats {

/// The copy of the tensor at `place` in type `type`, or in the stored type if unset. Corrections of
/// routers keep the stored type, because they must be exact. A tensor of `weights` that passes
/// through (passing_tensors.h) is copied byte by byte, unless it is quantised: then it is
/// dequantised, like all others. Throws like type_of().
TensorToStore copy_of(const WeightFiles& weights, const WeightPlace& place,
                      std::optional<DType> type);

/// Reads tensors of `weights` ahead, converts them to the types of `files` and writes them in the
/// background, in pieces that stay in a cache. `merged` changes the weights; null: nothing does.
/// Calls `progress` with the bytes written.
void copy_tensors(const WeightFiles& weights, MergedAdapters* merged,
                  const std::vector<std::vector<TensorToStore>>& files, ModelFolderWriter& writer,
                  const std::function<void(Bytes done)>& progress);

}  // namespace ballast::formats
