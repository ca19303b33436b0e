#pragma once

#include <filesystem>
#include <optional>

#include "ballast/model/adapters.h"
#include "ballast/model/quantization.h"
#include "ballast/text/json.h"

// A checkpoint stores the adapters and the quantised base of its run as JSON objects, and a resumed
// run compares them field by field. Names and values of fields must never change.

namespace ballast::checkpoint {

/// Returns all settings of the adapters, with targets and modules in alphabetical order; null
/// without adapters.
text::Json identity_of(const std::optional<model::AdapterConfig>& adapters);
/// Returns the format of the frozen matrices; null if they are not quantised.
text::Json identity_of(const std::optional<model::Quantization>& base);

/// Converts the adapters stored in a checkpoint (nullptr: none) to the form of identity_of(). Also
/// parses the sentences in old checkpoints: "rank 8, alpha 16 (rsLoRA), for q_proj, v_proj". Throws
/// Error(data) with `path`.
text::Json read_adapters(const text::Json* stored, const std::filesystem::path& path);
/// Reads the quantised base, including the old sentence "nf4 with scales in 8 bits".
text::Json read_quantization(const text::Json* stored, const std::filesystem::path& path);

/// Throws Error(data) that begins with `folder` and gives the first field that differs, if the
/// adapters of a checkpoint compute another model than those `here`. Dropout is ignored, and
/// modules_to_save is covered by the frozen tensors of each block.
void check_adapters(const std::filesystem::path& folder, const text::Json& stored,
                    const std::optional<model::AdapterConfig>& here);
/// Compares the quantised base like check_adapters().
void check_quantization(const std::filesystem::path& folder, const text::Json& stored,
                        const std::optional<model::Quantization>& here);

}  // namespace ballast::checkpoint
