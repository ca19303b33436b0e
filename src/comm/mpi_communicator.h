#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "src/comm/mpi_session.h"

namespace ballast::comm {

/// A channel of the host device: collectives run on the thread of the stream they are given.
/// `members`: see Ranks::make_channel. Collective.
std::unique_ptr<Communicator> make_mpi_communicator(std::shared_ptr<MpiSession> session,
                                                    const Launch& launch,
                                                    std::span<const std::uint32_t> members);

}  // namespace ballast::comm
