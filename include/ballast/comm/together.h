#pragma once

#include <functional>
#include <string>

#include "ballast/comm/communicator.h"
#include "ballast/core/error.h"

namespace ballast::comm {

/// An error that every rank throws at the same place, so that one of them may report it and all can
/// end in peace.
class JointError : public Error {
 public:
  using Error::Error;
};

/// Name of this machine, for messages.
std::string host_name();

/// Runs `work` on every rank and then compares how it went. Collective; `work` may make collective
/// calls, but must not fail on one rank between two of them. Throws JointError, the same on all
/// ranks, when it failed on any: its message when all have the same, or else that of the first rank
/// it failed on, behind "rank 2 on HOST: ". Error(comm) and Error(interrupted) of `work` are thrown
/// on as they are, since nothing can be compared behind them. With no ranks (nullptr), or one,
/// `work` is simply called.
void together(Ranks* ranks, const std::function<void()>& work);

}  // namespace ballast::comm
