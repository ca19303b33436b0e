#pragma once

#include <string>
#include <vector>

#include "ballast/model/family.h"
#include "ballast/text/json.h"

namespace ballast::config {

/// A config.json of Hugging Face in which the keys of rotary positions have the form of the model
/// section of `family`: rope_theta, rope_scaling (null: not scaled) and, for families that have
/// them, partial_rotary_factor and rope_local_base_freq. Each has the value that the family's class
/// of transformers 5 uses: rope_scaling overrides rope_parameters, values in them override those of
/// the config itself, and missing values are the class's defaults. Appends to `notes` which keys
/// have no effect. Throws Error(config) naming `file` and the key for settings that the class does
/// not compute.
text::Json with_rope_keys(text::Json json, const model::Family& family, const std::string& file,
                          std::vector<std::string>& notes);

/// Adds the keys of rotary positions that transformers' class of the family reads under other
/// names. `out` is a config.json that already has the keys of the model section.
void add_rope_keys(text::Json& out, const model::Family& family);

/// Moves keys of rope_scaling that the section has, too, to the section. The values of rope_scaling
/// apply; earlier versions wrote them there.
text::Json with_separate_rope_keys(text::Json section);

/// Whether a config.json has a key of rotary positions.
bool has_rope_keys(const text::Json& json);

}  // namespace ballast::config
