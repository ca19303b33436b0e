#pragma once

#include <span>
#include <string>
#include <vector>

#include "ballast/model/architecture.h"

namespace ballast::model {

/// Names of the families that have the key of the model section, in order of registration.
std::vector<std::string> families_with_key(std::string_view key);

/// Returns those of `keys`, keys of the model section, whose values change nothing that the model
/// computes and no limit that it sets, whatever they are, because other keys switch them off.
/// `given`: a valid config before complete(). A key is tried with other values; it has an effect if
/// one of them makes another model, or if none of them is valid.
std::vector<std::string> unused_keys(const ModelConfig& given, std::span<const std::string> keys);

}  // namespace ballast::model
