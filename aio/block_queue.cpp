#include "aio/block_queue.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <future>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <pthread.h>

#include "ballast/core/error.h"

namespace ballast::aio {
namespace {

/// Far below what one read or write call takes (2 GiB - 4 KiB), and fits io_uring's 32-bit length.
constexpr Bytes kMaxBlockBytes = 1 * kGiB;
/// Half of what an io_uring ring holds at most is plenty for any device.
constexpr unsigned kMaxDepth = 16384;
/// EAGAIN means the kernel is short of something right now: ask again at this pace, and call it an
/// error after some seconds of nothing but refusals.
constexpr auto kRefusalPause = std::chrono::microseconds(100);
constexpr unsigned kMaxRefusals = 20000;
constexpr auto kPatience = std::chrono::milliseconds(1000);

std::string describe(const Request& request) {
  return fmt::format("{} {} offset={} length={}",
                     request.direction == Direction::read ? "read" : "write", request.file->name(),
                     request.offset, request.lease.bytes().size());
}

void validate(const Request& request) {
  expects(request.file != nullptr, "an aio request needs a file");
  const File& file = *request.file;
  const HostBytes bytes = request.lease.bytes();
  const auto require = [&](bool condition, std::string_view problem) {
    if (!condition) {
      throw Error(ErrorCategory::state, fmt::format("{}: {}", describe(request), problem));
    }
  };
  require(request.offset <= file.size() && bytes.size() <= file.size() - request.offset,
          fmt::format("outside the file of {} bytes", file.size()));
  const auto aligned = [&](std::uint64_t value, std::string_view what) {
    require(value % file.alignment() == 0,
            fmt::format("{} is no multiple of the alignment {}", what, file.alignment()));
  };
  aligned(request.offset, "the offset");
  aligned(bytes.size(), "the length");
  aligned(reinterpret_cast<std::uintptr_t>(bytes.data()), "the buffer's address");
}

}  // namespace

BlockQueue::BlockQueue(std::string backend, const QueueOptions& options,
                       MakeTransport make_transport)
    : backend_(std::move(backend)),
      block_bytes_(std::min(options.block_bytes, kMaxBlockBytes)),
      depth_(options.depth) {
  if (options.block_bytes == 0) {
    throw Error(ErrorCategory::config, "aio: block_bytes must be above 0, for example 1 MiB");
  }
  if (options.depth == 0 || options.depth > kMaxDepth) {
    throw Error(
        ErrorCategory::config,
        fmt::format("aio: the queue depth must be from 1 to {}, not {}", kMaxDepth, options.depth));
  }
  pieces_.resize(depth_);
  for (Piece& piece : pieces_) idle_.push_back(&piece);

  std::promise<void> ready;
  auto outcome = ready.get_future();
  try {
    owner_ = std::thread([this, &ready, &make_transport] {
      pthread_setname_np(pthread_self(), "aio-owner");
      try {
        transport_ = make_transport(depth_);
      } catch (...) {
        ready.set_exception(std::current_exception());
        return;
      }
      ready.set_value();
      run();
      transport_.reset();
    });
  } catch (const std::system_error& error) {
    throw Error(ErrorCategory::io, "cannot start the aio owner thread", error.code().value());
  }
  try {
    outcome.get();
  } catch (...) {
    owner_.join();
    throw;
  }
}

BlockQueue::~BlockQueue() {
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
    // Under the lock, because the owner thread destroys the transport once it sees the flag.
    transport_->wake();
  }
  owner_.join();
}

Ticket BlockQueue::submit(Request request) {
  validate(request);
  auto transfer = std::make_unique<Transfer>();
  transfer->completion.direction = request.direction;
  transfer->completion.offset = request.offset;
  transfer->completion.length = request.lease.bytes().size();
  transfer->completion.file = request.file->name();
  transfer->request = std::move(request);

  const std::scoped_lock lock(mutex_);
  expects(!stopping_, "submit on an aio queue that is being destroyed");
  const Ticket ticket{++last_id_};
  const bool owner_knows = !arrivals_.empty();
  arrivals_.push_back(transfer.get());
  transfers_.emplace(ticket.id, std::move(transfer));
  if (!owner_knows) transport_->wake();
  return ticket;
}

std::vector<Ticket> BlockQueue::submit(std::span<Request> requests) {
  for (const Request& request : requests) validate(request);
  std::vector<Ticket> tickets;
  for (Request& request : requests) tickets.push_back(submit(std::move(request)));
  return tickets;
}

void BlockQueue::cancel() {
  const std::scoped_lock lock(mutex_);
  cancelled_ = true;
}

Completion BlockQueue::wait(Ticket ticket) {
  std::unique_lock lock(mutex_);
  const auto found = transfers_.find(ticket.id);
  expects(found != transfers_.end() && !found->second->claimed,
          "wait for an aio ticket that was never given out or was waited for already");
  Transfer& transfer = *found->second;
  transfer.claimed = true;
  finished_.wait(lock, [&] { return transfer.done; });
  Completion completion = std::move(transfer.completion);
  transfers_.erase(ticket.id);
  return completion;
}

QueueCounters BlockQueue::counters() const {
  const std::scoped_lock lock(mutex_);
  return counters_;
}

void BlockQueue::run() {
  std::vector<Block*> finished;
  finished.reserve(depth_);
  while (true) {
    const bool stopping = take_arrivals();
    start_blocks();
    if (stopping && idle_.size() == depth_) return;
    finished.clear();
    transport_->reap(finished, 1, kPatience);
    for (Block* block : finished) finish(static_cast<Piece&>(*block));
  }
}

bool BlockQueue::take_arrivals() {
  Backlog arrivals;
  bool stopping = false;
  {
    const std::scoped_lock lock(mutex_);
    arrivals.swap(arrivals_);
    stopping = stopping_;
  }
  for (Transfer* transfer : arrivals) {
    if (transfer->completion.length == 0) {
      complete(*transfer);
    } else {
      backlog(*transfer).push_back(transfer);
    }
  }
  return stopping;
}

void BlockQueue::start_blocks() {
  while (!idle_.empty()) {
    Backlog& queue = reads_.empty() ? writes_ : reads_;
    if (queue.empty()) return;
    Transfer& transfer = *queue.front();
    const Request& request = transfer.request;
    const Bytes granule = request.file->alignment();
    const Bytes whole = std::max(granule, block_bytes_ / granule * granule);
    const HostBytes bytes = request.lease.bytes();

    Piece& piece = *idle_.back();
    idle_.pop_back();
    piece.transfer = &transfer;
    piece.refusals = 0;
    piece.direction = request.direction;
    piece.descriptor = request.file->descriptor();
    piece.data = bytes.data() + transfer.cut;
    piece.length = std::min<Bytes>(whole, bytes.size() - transfer.cut);
    piece.offset = request.offset + transfer.cut;

    transfer.cut += piece.length;
    ++transfer.in_flight;
    if (transfer.cut == bytes.size()) queue.pop_front();
    transport_->start(piece);
  }
}

void BlockQueue::finish(Piece& piece) {
  Transfer& transfer = *piece.transfer;
  if (piece.result == -EINTR) return transport_->start(piece);
  if (piece.result == -EAGAIN && ++piece.refusals < kMaxRefusals) {
    std::this_thread::sleep_for(kRefusalPause);
    return transport_->start(piece);
  }
  if (piece.result < 0) {
    fail(transfer, static_cast<int>(-piece.result));
    return retire(piece);
  }
  piece.refusals = 0;

  // The rest must start aligned, so what lies beyond the last granule is transferred again. Less
  // than one granule is the end of the file, or a device that takes no more.
  auto progress = static_cast<Bytes>(piece.result);
  if (progress < piece.length) progress -= progress % transfer.request.file->alignment();
  if (progress == 0) {
    fail(transfer, EIO);
    return retire(piece);
  }
  piece.data += progress;
  piece.offset += progress;
  piece.length -= progress;
  transfer.completion.transferred += progress;
  {
    const std::scoped_lock lock(mutex_);
    (piece.direction == Direction::read ? counters_.bytes_read : counters_.bytes_written) +=
        progress;
    if (piece.length > 0) ++counters_.continued;
  }
  if (piece.length > 0) return transport_->start(piece);
  retire(piece);
}

void BlockQueue::retire(Piece& piece) {
  Transfer& transfer = *std::exchange(piece.transfer, nullptr);
  idle_.push_back(&piece);
  {
    const std::scoped_lock lock(mutex_);
    ++counters_.blocks;
  }
  --transfer.in_flight;
  if (transfer.in_flight == 0 && transfer.cut == transfer.completion.length) complete(transfer);
}

void BlockQueue::fail(Transfer& transfer, int error_number) {
  if (transfer.completion.error_number == 0) transfer.completion.error_number = error_number;
  if (transfer.cut < transfer.completion.length) {
    std::erase(backlog(transfer), &transfer);
    transfer.cut = transfer.completion.length;
  }
}

void BlockQueue::complete(Transfer& transfer) {
  transfer.request.lease.release();
  const std::scoped_lock lock(mutex_);
  transfer.done = true;
  finished_.notify_all();
}

BlockQueue::Backlog& BlockQueue::backlog(const Transfer& transfer) {
  return transfer.completion.direction == Direction::read ? reads_ : writes_;
}

}  // namespace ballast::aio
