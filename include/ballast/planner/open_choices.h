#pragma once

#include "ballast/config/config.h"

namespace ballast::planner {

/// Whether `config` leaves anything that is decided with rates: tiers of weights or optimizer
/// states, or the micro-batch size. If these are named, a rule decides what else is open
/// (activations, gradients, the order, intermediates), and no machine needs to be measured for it.
bool leaves_choices(const config::Config& config);

}  // namespace ballast::planner
