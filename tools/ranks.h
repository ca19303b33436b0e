#pragma once

#include <functional>

#include "ballast/comm/communicator.h"
#include "ballast/core/error.h"

namespace ballast::tools {

/// Exit status of the program for an error: 2 for bad usage or config, 130 after SIGINT, 143 after
/// SIGTERM, 1 for everything else.
int status_of(const Error& error);

/// Thrown when a run of several ranks has failed and its error has been printed.
struct Reported {
  int status = 1;
};

/// Joins the run of several ranks that `launch` describes and calls `work`. After a
/// comm::JointError, which all ranks throw, rank 0 prints it and all throw Reported. After any
/// other exception this rank prints it, unless another rank has failed before, and ends the whole
/// run. Throws Error(comm) if it cannot join.
void run_as_rank(const comm::Launch& launch, const comm::JoinOptions& options,
                 const std::function<void(comm::Ranks&)>& work);

}  // namespace ballast::tools
