#pragma once

#include <string>
#include <vector>

#include "ballast/config/config.h"

#include "src/config/key.h"

namespace ballast::config {

/// `optimizer`: the type, then the parameters that this type has. DeepSpeed's keys without a
/// meaning are noted in `log`.
Section optimizer_keys(OptimizerSection& optimizer, std::vector<std::string>& log);

/// `scheduler`, likewise.
Section scheduler_keys(SchedulerSection& scheduler);

}  // namespace ballast::config
