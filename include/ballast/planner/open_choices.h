#pragma once

#include "ballast/config/config.h"

namespace ballast::planner {

/// Returns whether `config` leaves choices that need rates: tiers of weights or optimizer states,
/// the micro-batch size or the number of devices. If these are set, a rule decides everything else
/// that is open (activations, gradients, the order, intermediates), and no measurement is needed.
bool leaves_choices(const config::Config& config);

}  // namespace ballast::planner
