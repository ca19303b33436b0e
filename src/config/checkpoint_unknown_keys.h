#pragma once

#include <string>
#include <vector>

#include "ballast/model/family.h"
#include "ballast/text/json.h"

namespace ballast::config {

/// Checks the keys of config.json `file` that the model section does not use. `keys` and `rules`
/// are those of its family. Appends notes to `notes`: one for each kind of dropout, and one for all
/// unknown keys that are null or false, with which transformers computes nothing. Throws
/// Error(config) that names all other unknown keys, since they may change what the model computes.
void check_unknown_keys(const text::Json& json, const std::vector<model::CheckpointKey>& keys,
                        const model::CheckpointRules& rules, const std::string& file,
                        std::vector<std::string>& notes);

}  // namespace ballast::config
