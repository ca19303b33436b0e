#pragma once

#include <memory>

#include "src/comm/members.h"
#include "src/comm/mpi_session.h"

namespace ballast::comm {

/// A channel of the host device: collectives run on the thread of the stream they are given.
/// Collective.
std::unique_ptr<Communicator> make_mpi_communicator(std::shared_ptr<MpiSession> session,
                                                    Members members);

}  // namespace ballast::comm
