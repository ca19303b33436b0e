#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "src/config/key.h"

namespace ballast::config {

/// `table` plus the keys that DeepSpeed has in `section` ("" is the top level) and that are no
/// setting here: those without meaning are accepted and noted in `log` as "path: reason", those
/// that would change what is trained are an error unless they are switched off.
Section with_deepspeed_keys(Section table, std::string_view section, std::vector<std::string>& log);

/// Rewrites DeepSpeed's deprecated spellings to the present ones and notes each in `log`. Throws
/// Error(config) when both are given.
void map_deprecated(Document& document, std::vector<std::string>& log);

}  // namespace ballast::config
