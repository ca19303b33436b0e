#pragma once

#include <string>
#include <vector>

#include "ballast/model/family.h"
#include "ballast/text/json.h"

namespace ballast::config {

/// Section of config.json that describes quantised weights.
inline constexpr const char* kQuantization = "quantization_config";

/// Checks the keys of config.json `file` that the model section of `family` does not use. Appends
/// notes to `notes`: one for each kind of dropout, and one for all keys that the family's class of
/// transformers does not read. Throws Error(config) that names all other unknown keys, since they
/// may change what the model computes. For a family whose class transformers does not have, these
/// are all unknown keys except those that are null or false.
void check_unknown_keys(const text::Json& json, const model::Family& family,
                        const std::string& file, std::vector<std::string>& notes);

}  // namespace ballast::config
