#pragma once

#include <filesystem>

#include "ballast/model/architecture.h"
#include "ballast/text/json.h"

namespace ballast::config {

// Folders of PEFT (Hugging Face's library of adapters): adapter_config.json describes the adapters,
// adapter_model.safetensors holds the tensors, each NAME as kAdapterPrefix + NAME.

inline constexpr const char* kAdapterConfig = "adapter_config.json";
inline constexpr const char* kAdapterWeights = "adapter_model.safetensors";
inline constexpr const char* kAdapterPrefix = "base_model.model.";

/// The keys of ballast.adapters that the adapter_config.json in `folder` describes, all but path.
/// Throws Error(config) naming the file and the key: no such file, another kind of adapter, and a
/// setting that changes what adapters compute and that Ballast lacks.
text::Json read_adapter_folder(const std::filesystem::path& folder);

/// adapter_config.json for the adapters of `model` over the model at `base` (empty: unknown).
text::Json make_adapter_config(const model::Architecture& model, const std::filesystem::path& base);

}  // namespace ballast::config
