#include <fmt/format.h>

#include "ballast/core/error.h"

#include "src/comm/factories.h"

namespace ballast::comm {

std::unique_ptr<Ranks> join_ranks(const Launch& launch, const JoinOptions& options) {
  expects(launch.rank < launch.world, "join_ranks: the rank is outside of the world");
  expects(options.timeout_seconds > 0.0, "join_ranks: the timeout is not above 0");
  if (launch.world == 1) return make_self_ranks(launch, options);
  if (const std::string refusal = mpi_refusal(); !refusal.empty()) {
    throw Error(ErrorCategory::comm, fmt::format("{} started {} processes, but this program was {}",
                                                 launch.launcher, launch.world, refusal));
  }
  return make_mpi_ranks(launch, options);
}

}  // namespace ballast::comm
