#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>

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
  /// Type of all weights. If unset: for a run, the types of the folder that it imported, or that of
  /// the config.json if it imported none; the stored types for other models and for adapters.
  /// Quantised weights that have not changed then keep their codes.
  std::optional<DType> type;
  /// Maximum size of the data in a file with several tensors. If unset: the files of the folder,
  /// for a run those of the folder that it imported, or kShardSize if it imported none.
  std::optional<Bytes> shard_size;
  bool merged = false;  ///< merge adapters into the model that they belong to
  bool codes = false;   ///< quantise changed weights in the format in which the folder had them
};

/// Error of weights that were quantised for an export.
struct QuantizationError {
  std::size_t tensors = 0;
  double largest = 0.0;  ///< largest difference, relative to the largest weight of its block
  double rms = 0.0;      ///< root mean square of all differences, relative to that of the weights
};

struct ExportSummary {
  std::size_t files = 0;
  std::size_t tensors = 0;
  std::size_t aligned = 0;  ///< tensors that start at a multiple of 4 KiB of their file
  Bytes bytes = 0;          ///< bytes of weights
  QuantizationError quantized;
  std::string note;  ///< one line about adapters that PEFT cannot load; "": none
};

/// Writes the model at `from`, a run directory or a Hugging Face folder, to the new folder
/// `out`: weights, config.json, generation_config.json and the tokenizer's files. Tensors that have
/// not changed since they were imported have the same bytes and, unless `options` say otherwise,
/// are in the same files. For adapters, from a run that trained them or a PEFT folder, it writes a
/// PEFT folder or, if `merged`, the model that adapter_config.json names as their base, merged with
/// them: in fp32, rounded once. Calls `progress` with the bytes written and the total; it may throw
/// to stop. A failure leaves nothing. Throws Error(data) for bad input, naming file and tensor;
/// Error(usage) if `out` exists or if there is nothing to merge or to quantise; Error(io).
ExportSummary export_model(const std::filesystem::path& from, const std::filesystem::path& out,
                           const ExportOptions& options,
                           const std::function<void(Bytes done, Bytes total)>& progress);

}  // namespace ballast::formats
