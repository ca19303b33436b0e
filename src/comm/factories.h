#pragma once

#include <memory>

#include "ballast/comm/communicator.h"

namespace ballast::comm {

/// A run of one process; calls nothing of MPI.
std::unique_ptr<Ranks> make_self_ranks(const Launch& launch);

/// A run of several processes over MPI. Throws Error(comm): see join_ranks.
std::unique_ptr<Ranks> make_mpi_ranks(const Launch& launch, const JoinOptions& options);

}  // namespace ballast::comm
