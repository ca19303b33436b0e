#pragma once

#include "ballast/config/config.h"

#include "src/config/key.h"

namespace ballast::config {

/// The one table of all keys, bound to the fields of `config`, which it must not outlive.
Section all_keys(Config& config);

/// Derives what is missing (batch triplet, defaults that depend on other keys) and checks what
/// several keys say together. Throws Error(config) naming the keys and their values.
void complete(Config& config, const Document& document, std::uint64_t world);

}  // namespace ballast::config
