#pragma once

#include <filesystem>
#include <functional>
#include <optional>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"
#include "ballast/formats/model_folder.h"

namespace ballast::formats {

/// Name of the folder of a run's weights in its run directory.
inline constexpr const char* kRunWeights = "weights";

/// Place of the weights at `path`: the folder that a run has saved if `path` is its directory,
/// otherwise `path`. Throws Error(data) for a run without weights.
std::filesystem::path weights_at(const std::filesystem::path& path);

struct ExportOptions {
  /// Type of all weights. If unset: that of the config.json for a run, the stored types for other
  /// models and for adapters.
  std::optional<DType> type;
  Bytes shard_size = kShardSize;  ///< maximum size of the data in a file with several tensors
  bool merged = false;            ///< merge adapters into the model that they belong to
};

struct ExportSummary {
  std::size_t files = 0;
  std::size_t tensors = 0;
  std::size_t aligned = 0;  ///< tensors that start at a multiple of 4 KiB of their file
  Bytes bytes = 0;          ///< bytes of weights
};

/// Writes the model at `from`, a run directory or a Hugging Face folder, to the new folder
/// `out`: weights, config.json, generation_config.json and the tokenizer's files. For adapters,
/// from a run that trained them or a PEFT folder, it writes a PEFT folder or, if `merged`, the
/// model that adapter_config.json names as their base, merged with them: in fp32, rounded once.
/// Calls
/// `progress` with the bytes written and the total; it may throw to stop. A failure leaves nothing.
/// Throws Error(data) for bad input, naming file and tensor; Error(usage) if `out` exists;
/// Error(io).
ExportSummary export_model(const std::filesystem::path& from, const std::filesystem::path& out,
                           const ExportOptions& options,
                           const std::function<void(Bytes done, Bytes total)>& progress);

}  // namespace ballast::formats
