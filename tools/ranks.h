#pragma once

#include <functional>

#include "ballast/comm/communicator.h"
#include "ballast/core/error.h"

namespace ballast::tools {

/// Exit status of the program for an error: 2 for bad usage or config, 1 for everything else.
int status_of(const Error& error);

/// Thrown when a run of several ranks has failed and the one line about it has been printed.
struct Reported {
  int status = 1;
};

/// Joins the run of several ranks that `launch` describes, and does `work` as one of them. When it
/// throws comm::JointError, which all ranks do alike, rank 0 prints it, MPI is ended and all throw
/// Reported. With any other exception this rank says what it met, unless another one has done so,
/// and ends the whole run. Throws Error(comm) when it cannot join.
void run_as_rank(const comm::Launch& launch, const comm::JoinOptions& options,
                 const std::function<void(comm::Ranks&)>& work);

}  // namespace ballast::tools
