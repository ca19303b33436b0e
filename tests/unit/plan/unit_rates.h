#pragma once

#include "ballast/plan/rates.h"

namespace ballast::plan {

/// A machine on which a byte, a FLOP and a unit of traffic each take a second.
inline Rates unit_rates() {
  Rates rates;
  rates.name = "unit";
  rates.forward = rates.backward = rates.head = {{1.0, 1.0}};
  rates.device_memory_per_second = rates.update_per_second = 1.0;
  rates.upload_per_second = rates.offload_per_second = 1.0;
  rates.read_per_second = rates.write_per_second = 1.0;
  rates.mixed_per_second = 2.0;
  rates.fabric_per_second = rates.network_per_second = 1.0;
  return rates;
}

/// Rates with this number of cores for the threads of computation and updates.
inline Rates with_cores(unsigned cores, unsigned compute, unsigned update) {
  Rates rates = unit_rates();
  rates.shared_cores = cores;
  rates.compute_threads = compute;
  rates.update_threads = update;
  return rates;
}

}  // namespace ballast::plan
