#pragma once

#include <string>
#include <vector>

#include "ballast/model/family.h"
#include "ballast/text/json.h"

namespace ballast::config {

/// A config.json of Hugging Face with the keys of rotary positions as the model section of `family`
/// has them: rope_theta, rope_scaling (null: not scaled) and, for families that have them,
/// partial_rotary_factor and rope_local_base_freq. Each has the value that the family's class of
/// transformers 5 takes: rope_scaling hides rope_parameters, values in them hide those of the
/// config itself, and missing values are the class's. Appends to `notes` which keys do not count.
/// Throws Error(config) naming `file` and the key for what the class does not compute.
text::Json with_rope_keys(text::Json json, const model::Family& family, const std::string& file,
                          std::vector<std::string>& notes);

/// Adds keys of rotary positions that the family's class reads elsewhere to the config.json `out`,
/// which has those of the model section.
void add_rope_keys(text::Json& out, const model::Family& family);

/// A model section whose rope_scaling has no keys that the section has, too. Those of rope_scaling
/// count, and sections made by earlier versions have them there.
text::Json with_separate_rope_keys(text::Json section);

/// Whether a config.json has a key of rotary positions.
bool has_rope_keys(const text::Json& json);

}  // namespace ballast::config
