#pragma once

#include <filesystem>
#include <optional>

#include "ballast/model/adapters.h"
#include "ballast/model/quantization.h"
#include "ballast/text/json.h"

// A checkpoint stores the adapters and the quantised base of its run as JSON objects, and a run
// that resumes compares them field by field. Names and values of fields must never change.

namespace ballast::checkpoint {

/// All settings of the adapters, targets and modules in alphabetical order; null without adapters.
text::Json identity_of(const std::optional<model::AdapterConfig>& adapters);
/// The format of the frozen matrices; null if they are not quantised.
text::Json identity_of(const std::optional<model::Quantization>& base);

/// Reads the adapters that a checkpoint has stored (nullptr: none) into the form of
/// identity_of(). Also reads the sentences of checkpoints that were written before there were
/// fields: "rank 8, alpha 16 (rsLoRA), for q_proj, v_proj". Throws Error(data) naming `path`.
text::Json read_adapters(const text::Json* stored, const std::filesystem::path& path);
/// Reads the quantised base. Also takes the sentence "nf4 with scales in 8 bits".
text::Json read_quantization(const text::Json* stored, const std::filesystem::path& path);

/// Throws Error(data) that begins with `folder` and names the first field that differs if the
/// adapters of a checkpoint compute another model than those `here`. Dropout does not, and
/// modules_to_save is in the frozen tensors of each block.
void check_adapters(const std::filesystem::path& folder, const text::Json& stored,
                    const std::optional<model::AdapterConfig>& here);
/// Compares the quantised base like check_adapters().
void check_quantization(const std::filesystem::path& folder, const text::Json& stored,
                        const std::optional<model::Quantization>& here);

}  // namespace ballast::checkpoint
