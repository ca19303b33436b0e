#pragma once

#include <memory>

#include "ballast/comm/communicator.h"

#include "src/comm/members.h"
#include "src/comm/patience.h"

namespace ballast::comm {

/// A run of one process; calls nothing of MPI.
std::unique_ptr<Ranks> make_self_ranks(const Launch& launch, const JoinOptions& options);

/// A run of several processes over MPI. Throws Error(comm): see join_ranks.
std::unique_ptr<Ranks> make_mpi_ranks(const Launch& launch, const JoinOptions& options);

/// A channel of `members` of `ranks` for the CUDA device `device` over NCCL; they find each other
/// through `ranks`, which may be gone afterwards. Collective. Throws Error(comm), also when the
/// program was built without NCCL.
std::unique_ptr<Communicator> make_nccl_communicator(Ranks& ranks, const Members& members,
                                                     device::Device& device,
                                                     const std::shared_ptr<Patience>& patience);

}  // namespace ballast::comm
