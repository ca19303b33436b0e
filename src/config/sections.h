#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "ballast/config/config.h"

#include "src/config/key.h"

namespace ballast::config {

/// The one table of all keys, bound to the fields of `config`, which it must not outlive.
Section all_keys(Config& config);

// Parts of that table. DeepSpeed's keys without a meaning here are noted in `log` as "path:
// reason".

/// `optimizer`: the type, then the parameters of that type.
Section optimizer_keys(OptimizerSection& optimizer, std::vector<std::string>& log);
/// `scheduler`, likewise.
Section scheduler_keys(SchedulerSection& scheduler);
/// `zero_optimization`.
Section zero_keys(ZeroSection& zero, std::vector<std::string>& log);
/// `aio`.
Section aio_keys(AioSection& aio, std::vector<std::string>& log);

/// `table` plus the keys that DeepSpeed has in `section` ("" is the top level) and Ballast has not:
/// those that change nothing are accepted and noted in `log`, those that would change what is
/// trained are an error unless they are switched off.
Section with_deepspeed_keys(Section table, std::string_view section, std::vector<std::string>& log);

/// Rewrites DeepSpeed's deprecated spellings to the present ones and notes each in `log`. Throws
/// Error(config) when both are given.
void map_deprecated(Document& document, std::vector<std::string>& log);

/// Derives what is missing (batch triplet, defaults that depend on other keys) and checks what
/// several keys say together. Throws Error(config) naming the keys and their values.
void complete(Config& config, const Document& document, std::uint64_t world);

}  // namespace ballast::config
