#include "ballast/core/error.h"

#include "src/comm/channel.h"

namespace ballast::comm {

std::string mpi_refusal() {
  return "built without MPI: reconfigure with -Dmpi=enabled";
}

std::unique_ptr<Ranks> make_mpi_ranks(const Launch&, const JoinOptions&) {
  throw Error(ErrorCategory::comm, "this program was " + mpi_refusal());
}

}  // namespace ballast::comm
