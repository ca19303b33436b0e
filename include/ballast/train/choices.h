#pragma once

#include "ballast/config/config.h"

namespace ballast::train {

/// `config` with every "auto" decided by the planner for this machine, whose rates are measured
/// when no run or plan has done so before. Logs what was chosen. A config that leaves nothing open
/// is returned as it is, and nothing is measured. Throws like engine::decide() and machine_rates().
config::Config decide_choices(const config::Config& config);

}  // namespace ballast::train
