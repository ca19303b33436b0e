#pragma once

#include <string>

#include "ballast/text/json.h"

namespace ballast::config {

/// A config.json of Hugging Face with the keys of rotary positions in one form: rope_theta, and
/// rope_scaling as model.rope_scaling has it. Transformers 5 has both in rope_parameters, for
/// models with windows by type of layer (rope_local_base_freq is the base of layers with one);
/// older versions have rope_scaling with `type` for rope_type; and some types take a value from
/// max_position_embeddings or original_max_position_embeddings beside them. Throws Error(config)
/// naming `file` and the key if two keys contradict each other.
text::Json with_rope_keys(text::Json json, const std::string& file);

}  // namespace ballast::config
