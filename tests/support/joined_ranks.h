#pragma once

#include "ballast/comm/communicator.h"

namespace ballast::test {

/// All processes of mpirun, or this process without it. They join once, because MPI starts once per
/// process.
inline comm::Ranks& joined_ranks() {
  static const auto joined = comm::join_ranks(comm::read_launch(), {.timeout_seconds = 120.0});
  return *joined;
}

}  // namespace ballast::test
