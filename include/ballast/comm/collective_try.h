#pragma once

#include <functional>
#include <string>

#include "ballast/comm/communicator.h"
#include "ballast/core/error.h"

namespace ballast::comm {

/// An error that every rank throws at the same place, so that one rank reports it and all can shut
/// down normally. collective_try() makes it from the errors of single ranks. A decision based on
/// values that all ranks have, such as the loss of a step, throws it directly.
class JointError : public Error {
 public:
  using Error::Error;
};

/// Name of this machine, for messages.
std::string host_name();

/// Runs `work` on every rank and compares the results. Collective; `work` may make collective
/// calls, but must not fail on one rank between two of them. If it fails on any rank, all ranks
/// throw the same JointError: the common message when all ranks have the same, otherwise that of
/// the first failed rank, prefixed with "rank 2 on HOST: ". Error(comm) and Error(interrupted) from
/// `work` are rethrown unchanged, since the ranks can no longer communicate. Without ranks
/// (nullptr), or with one, `work` is simply called.
void collective_try(Ranks* ranks, const std::function<void()>& work);

/// Returns rank 0's value of `here` on every rank. Use it for facts that ranks may see differently,
/// such as whether a file exists. Collective. Without ranks (nullptr), returns `here`.
bool decided_by_root(Ranks* ranks, bool here);

}  // namespace ballast::comm
