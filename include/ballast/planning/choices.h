#pragma once

#include <cstdint>

#include "ballast/config/config.h"
#include "ballast/schedule/rates.h"

namespace ballast::planning {

/// The other ranks of a run, as far as a decision must know them.
struct Company {
  std::uint32_t world = 1;
  std::uint32_t local_world = 1;     ///< on this machine: they share its swap paths
  std::uint32_t sharing = 1;         ///< on the CPUs of this rank, itself included
  double received_per_second = 0.0;  ///< bytes that a rank receives in a collective
};

/// `config` with every "auto" decided by the planner for this machine, whose rates are measured
/// when no run or plan has done so before. Logs what was chosen. A config that leaves nothing open
/// is returned as it is, and nothing is measured. `company`: when several ranks will run it;
/// budgets and threads of `config` are then those of one rank. Throws like decide() and
/// machine_rates().
config::Config decide_choices(const config::Config& config, const Company& company = {});

/// Makes `rates` of a machine that was measured while the other ranks waited what one rank gets.
/// Copies and updates are not shared out: how much of the memory bandwidth each gets is not known.
/// A GPU shares no cores (`shared_cores` 0) with the update, and so it stays.
void share_out(schedule::Rates& rates, const Company& company);

}  // namespace ballast::planning
