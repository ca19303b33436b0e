#include "src/comm/nccl_channel.h"

#include <chrono>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/polling.h"

namespace ballast::comm {
namespace {

constexpr Collective kSetUp = {"setting up a channel", 0};
constexpr Collective kEnd = {"ending a channel", 0};

}  // namespace

bool accepted(ncclResult_t code) {
  return code == ncclSuccess || code == ncclInProgress;
}

NcclChannel::NcclChannel(Ranks& ranks, const Members& members, std::shared_ptr<Patience> patience)
    : patience_(std::move(patience)) {
  // One rank of each channel makes its identifier, and all see all of them.
  ncclUniqueId own = {};
  if (members.place() == 0) require(ncclGetUniqueId(&own), kSetUp);
  std::vector<ncclUniqueId> all(ranks.world());
  ranks.all_gather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)));
  const ncclUniqueId id = all[members.first_rank()];

  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  try {
    patience_->check(kSetUp, 0.0);
    require(ncclCommInitRankConfig(&communicator_, static_cast<int>(members.count()), id,
                                   static_cast<int>(members.place()), &config),
            kSetUp);
    settle(kSetUp);
  } catch (...) {
    abort();
    throw;
  }
}

NcclChannel::~NcclChannel() {
  if (communicator_ == nullptr) return;
  try {
    if (patience_->ends_quietly()) close();
  } catch (const Error&) {
    // What the run was for is done.
  }
  if (communicator_ != nullptr) abort();
}

void NcclChannel::close() {
  require(ncclCommFinalize(communicator_), kEnd);
  settle(kEnd);
  require(ncclCommDestroy(std::exchange(communicator_, nullptr)), kEnd);
}

void NcclChannel::abort() {
  patience_->give_up();
  // Nothing can be done about its failure: the process ends, and the driver cleans up behind it.
  if (communicator_ != nullptr) ncclCommAbort(std::exchange(communicator_, nullptr));
}

void NcclChannel::run_group(const Collective& what, const std::function<ncclResult_t()>& calls) {
  try {
    patience_->check(what, 0.0);
    expects(communicator_ != nullptr, "a collective on a channel that has ended");
    require(ncclGroupStart(), what);
    const ncclResult_t made = calls();
    const ncclResult_t ended = ncclGroupEnd();  // also after a failure: the thread is in the group
    require(made, what);
    require(ended, what);
    settle(what);
  } catch (...) {
    abort();
    throw;
  }
}

void NcclChannel::settle(const Collective& what) {
  Polling polling;
  while (true) {
    ncclResult_t state = ncclSuccess;
    require(ncclCommGetAsyncError(communicator_, &state), what);
    require(state, what);
    if (state == ncclSuccess) return;
    patience_->check(what, polling.seconds());
    polling.pause();
  }
}

void NcclChannel::look(const Collective& what, double waited_seconds) {
  if (communicator_ == nullptr) return;
  try {
    ncclResult_t state = ncclSuccess;
    require(ncclCommGetAsyncError(communicator_, &state), what);
    require(state, what);
    patience_->check(what, waited_seconds);
  } catch (...) {
    abort();
    throw;
  }
}

void NcclChannel::require(ncclResult_t code, const Collective& what) const {
  if (accepted(code)) return;
  // The last error belongs to the process; it is NCCL's only word on what a code is about.
  const char* const last = ncclGetLastError(communicator_);
  std::string text = ncclGetErrorString(code);
  if (last != nullptr && *last != '\0') text += fmt::format(": {}", last);
  for (char& letter : text) {
    if (letter == '\n') letter = ' ';
  }
  throw Error(ErrorCategory::comm, fmt::format("{}: NCCL: {}", to_text(what), text));
}

}  // namespace ballast::comm
