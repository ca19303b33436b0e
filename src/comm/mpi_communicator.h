#pragma once

#include <memory>

#include "src/comm/mpi_session.h"

namespace ballast::comm {

/// A channel of the host device: collectives run on the thread of the stream they are given.
/// Collective.
std::unique_ptr<Communicator> make_mpi_communicator(std::shared_ptr<MpiSession> session,
                                                    std::uint32_t rank, std::uint32_t world);

}  // namespace ballast::comm
