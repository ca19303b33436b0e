#include "aio/request_table.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <utility>

#include <fmt/format.h>

#include "ballast/aio/queue.h"
#include "ballast/core/error.h"

namespace ballast::aio {

namespace {

void validate(const Request& request) {
  expects(request.file != nullptr, "an aio request needs a file");
  const File& file = *request.file;
  const HostBytes bytes = request.memory;
  const auto require = [&](bool condition, std::string_view problem) {
    if (condition) return;
    throw Error(ErrorCategory::state,
                fmt::format("{}: {}",
                            describe(request.direction, file.name(), request.offset, bytes.size()),
                            problem));
  };
  if (request.offset > file.size() || bytes.size() > file.size() - request.offset) {
    require(false, fmt::format("outside the file of {} bytes", file.size()));
  }
  const auto aligned = [&](std::uint64_t value, std::string_view what) {
    if (value % file.alignment() == 0) return;
    require(false, fmt::format("{} is not a multiple of the alignment {}", what, file.alignment()));
  };
  aligned(request.offset, "the offset");
  aligned(bytes.size(), "the length");
  aligned(reinterpret_cast<std::uintptr_t>(bytes.data()), "the buffer's address");
}

std::unique_ptr<ActiveRequest> make_transfer(Request request, Clock::time_point now) {
  auto transfer = std::make_unique<ActiveRequest>();
  transfer->submitted = now;
  transfer->completion.direction = request.direction;
  transfer->completion.offset = request.offset;
  transfer->completion.length = request.memory.size();
  transfer->completion.file = request.file->name();
  transfer->request = std::move(request);
  return transfer;
}

}  // namespace

std::string describe(Direction direction, const std::string& file, Bytes offset, Bytes length) {
  return fmt::format("{} {} offset={} length={}", direction == Direction::read ? "read" : "write",
                     file, offset, length);
}

std::vector<Ticket> RequestTable::submit(std::span<Request> requests) {
  for (const Request& request : requests) validate(request);
  const auto now = Clock::now();
  std::vector<Owned> made;
  made.reserve(requests.size());
  for (Request& request : requests) made.push_back(make_transfer(std::move(request), now));
  std::vector<Ticket> tickets;
  tickets.reserve(made.size());

  const std::scoped_lock lock(mutex_);
  expects(!stopping_, "submit on an aio queue that is being destroyed");
  for (Owned& transfer : made) {
    transfer->id = ++last_id_;
    tickets.push_back({transfer->id});
    arrivals_.push_back(transfer.get());
    transfers_.emplace(transfer->id, std::move(transfer));
  }
  if (owner_wants_wake_ && !arrivals_.empty()) wake();
  return tickets;
}

Completion RequestTable::wait(Ticket ticket) {
  std::unique_lock lock(mutex_);
  const auto found = transfers_.find(ticket.id);
  expects(found != transfers_.end() && !found->second->claimed,
          "wait for an aio ticket that was never issued or was already waited for");
  ActiveRequest& transfer = *found->second;
  transfer.claimed = true;
  // A sleeping owner thread has started everything or has no room, so it need not wake up.
  if (!transfer.done && transfer.request.ahead) lifted_.push_back(ticket.id);
  done_.wait(lock, [&] { return transfer.done; });
  // Copied, because the owner thread may still need the file name of an abandoned transfer.
  Completion completion = transfer.completion;
  auto node = transfers_.extract(ticket.id);
  if (!transfer.free) orphans_.insert(std::move(node));
  return completion;
}

void RequestTable::cancel() {
  const std::scoped_lock lock(mutex_);
  cancelled_ = true;
  wake();
}

QueueCounters RequestTable::counters() const {
  const std::scoped_lock lock(mutex_);
  return counters_;
}

bool RequestTable::stop() {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  wake();
  done_.wait(lock, [&] { return ending_ != Ending::running; });
  return ending_ == Ending::complete;
}

void RequestTable::set_transport(Transport* transport) {
  const std::scoped_lock lock(mutex_);
  transport_ = transport;
}

RequestTable::Orders RequestTable::take() {
  Orders orders;
  const std::scoped_lock lock(mutex_);
  owner_wants_wake_ = false;
  orders.arrivals.swap(arrivals_);
  for (const std::uint64_t id : lifted_) {
    const auto found = transfers_.find(id);
    if (found != transfers_.end() && !found->second->done) {
      orders.lifted.push_back(found->second.get());
    }
  }
  lifted_.clear();
  orders.cancelled = cancelled_;
  orders.stopping = stopping_;
  return orders;
}

bool RequestTable::may_sleep(bool has_room) {
  const std::scoped_lock lock(mutex_);
  if (has_room && !arrivals_.empty()) return false;
  owner_wants_wake_ = has_room;
  return true;
}

void RequestTable::end(std::span<ActiveRequest* const> transfers, const QueueCounters& progress) {
  bool awaited = false;
  {
    const std::scoped_lock lock(mutex_);
    counters_.bytes_read += progress.bytes_read;
    counters_.bytes_written += progress.bytes_written;
    counters_.blocks += progress.blocks;
    counters_.continued += progress.continued;
    counters_.batches += progress.batches;
    for (ActiveRequest* transfer : transfers) {
      transfer->done = true;
      transfer->free = transfer->in_flight == 0;
      awaited = awaited || transfer->claimed;
    }
  }
  if (awaited) done_.notify_all();
}

void RequestTable::forget(ActiveRequest& transfer) {
  const std::scoped_lock lock(mutex_);
  transfer.free = true;
  orphans_.erase(transfer.id);
}

void RequestTable::finish(Ending ending) {
  {
    const std::scoped_lock lock(mutex_);
    ending_ = ending;
  }
  done_.notify_all();
}

void RequestTable::wake() {
  owner_wants_wake_ = false;
  if (transport_ != nullptr) transport_->wake();
}

void Completion::check(std::string_view stage) const {
  if (ok()) return;
  const std::string what = fmt::format("{}: {}", stage, describe(direction, file, offset, length));
  const auto fail = [&](std::string_view cause) {
    throw Error(ErrorCategory::io, fmt::format("{}: {}", what, cause));
  };
  if (end_of_file) fail("the file ends inside this range; it was truncated");
  if (error_number == ETIMEDOUT) {
    fail(fmt::format("no answer from the device for {:.0f} s; check the drive (dmesg)", seconds));
  }
  if (error_number == ECANCELED) fail("cancelled");
  if (error_number != 0) throw Error(ErrorCategory::io, what, error_number);
  fail(fmt::format("only {} bytes transferred", transferred));
}

}  // namespace ballast::aio
