#include "aio/block_queue.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <future>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <pthread.h>

#include "ballast/core/error.h"

namespace ballast::aio {

namespace {

/// Far below what one read or write call takes (2 GiB - 4 KiB), and fits io_uring's 32-bit length.
constexpr Bytes kMaxBlockBytes = 1 * kGiB;
/// Half of the largest io_uring ring, more than any device needs.
constexpr unsigned kMaxDepth = 16384;
/// EAGAIN means a temporary lack of kernel resources: retry at this interval, and fail after this
/// many refusals in a row (some seconds).
constexpr auto kRefusalPause = std::chrono::microseconds(100);
constexpr unsigned kMaxRefusals = 20000;
/// While more is queued than fits, up to this many blocks are awaited and replaced at a time. That
/// saves system calls while the other blocks keep the device busy.
constexpr unsigned kBatch = 8;
constexpr auto kLongestTick = std::chrono::milliseconds(1000);
constexpr auto kForever = std::chrono::milliseconds(3'600'000);

/// Calls `returned` of a request whose memory is no longer used.
void give_back_memory(Request& request) {
  if (const auto returned = std::exchange(request.returned, nullptr)) returned();
}

/// Keeps the owner of memory that the device may still write to alive forever.
void park(std::function<void()> returned) {
  static auto* const parked = new std::vector<std::function<void()>>;
  static std::mutex mutex;
  const std::scoped_lock lock(mutex);
  parked->push_back(std::move(returned));
}

std::chrono::milliseconds tick_for(double stall_seconds) {
  const auto quarter = std::chrono::milliseconds(static_cast<long>(stall_seconds * 250.0));
  return std::clamp(quarter, std::chrono::milliseconds(1), kLongestTick);
}

unsigned checked_depth(const QueueOptions& options) {
  if (options.block_bytes == 0) {
    throw Error(ErrorCategory::config, "aio: block_bytes must be above 0, for example 1 MiB");
  }
  if (options.depth == 0 || options.depth > kMaxDepth) {
    throw Error(
        ErrorCategory::config,
        fmt::format("aio: the queue depth must be from 1 to {}, not {}", kMaxDepth, options.depth));
  }
  if (!(options.stall_seconds > 0.0) || !(options.abandon_seconds >= options.stall_seconds)) {
    throw Error(ErrorCategory::config,
                fmt::format("aio: stall_seconds must be above 0 and at most abandon_seconds, not "
                            "{} and {}",
                            options.stall_seconds, options.abandon_seconds));
  }
  return options.depth;
}

}  // namespace

Dispatcher::Dispatcher(RequestTable& table, const QueueOptions& options)
    : table_(table),
      block_bytes_(std::min(options.block_bytes, kMaxBlockBytes)),
      in_flight_limit_(options.in_flight_bytes),
      stall_(options.stall_seconds),
      abandon_(options.abandon_seconds),
      tick_(tick_for(options.stall_seconds)),
      pieces_(checked_depth(options)) {
  for (Piece& piece : pieces_) idle_.push_back(&piece);
}

bool Dispatcher::run(Transport& transport) {
  std::vector<Block*> finished;
  finished.reserve(pieces_.size());
  now_ = watched_ = Clock::now();
  while (true) {
    const RequestTable::Orders orders = table_.take();
    accept(orders);
    start_blocks(transport);
    settle();
    if (orders.stopping && backlog_empty()) {
      if (idle()) return true;
      if (only_abandoned_left()) {
        park_unanswered();
        return false;
      }
    }
    if (!table_.may_sleep(has_room() || cancelled_)) continue;
    finished.clear();
    transport.reap(finished, wanted(), idle() ? kForever : tick_);
    look_at_the_clock();
    for (Block* block : finished) finish(static_cast<Piece&>(*block), transport);
    watch();
  }
}

void Dispatcher::accept(const RequestTable::Orders& orders) {
  for (ActiveRequest* transfer : orders.arrivals) {
    if (transfer->completion.length == 0) {
      ended_.push_back(transfer);
    } else {
      backlog(*transfer).push_back(transfer);
    }
  }
  for (ActiveRequest* transfer : orders.lifted) {
    if (std::erase(ahead_, transfer) > 0) waited_.push_back(transfer);
    transfer->lifted = true;
  }
  cancelled_ = orders.cancelled;
  if (cancelled_) end_backlog(ECANCELED);
}

void Dispatcher::end_backlog(int error_number) {
  for (Backlog* queue : {&waited_, &ahead_, &writes_}) {
    for (ActiveRequest* transfer : std::exchange(*queue, {})) {
      if (transfer->completion.error_number == 0) transfer->completion.error_number = error_number;
      transfer->cut = transfer->completion.length;
      if (transfer->in_flight == 0) ended_.push_back(transfer);
    }
  }
}

Dispatcher::Backlog& Dispatcher::backlog(const ActiveRequest& transfer) {
  if (transfer.completion.direction == Direction::write) return writes_;
  return transfer.request.ahead && !transfer.lifted ? ahead_ : waited_;
}

void Dispatcher::remove_from_backlog(ActiveRequest& transfer) {
  if (transfer.cut == transfer.completion.length) return;
  std::erase(backlog(transfer), &transfer);
  transfer.cut = transfer.completion.length;
}

ActiveRequest* Dispatcher::next_transfer() const {
  for (const Backlog* queue : {&waited_, &ahead_, &writes_}) {
    if (!queue->empty()) return queue->front();
  }
  return nullptr;
}

Bytes Dispatcher::next_length(const ActiveRequest& transfer) const {
  const Bytes granule = transfer.request.file->alignment();
  const Bytes whole = std::max(granule, block_bytes_ / granule * granule);
  return std::min<Bytes>(whole, transfer.completion.length - transfer.cut);
}

void Dispatcher::start_blocks(Transport& transport) {
  bool any = false;
  while (has_room()) {
    ActiveRequest* const transfer = next_transfer();
    if (transfer == nullptr) break;
    cut(*transfer, next_length(*transfer), transport);
    any = true;
  }
  if (any) ++progress_.batches;
}

void Dispatcher::cut(ActiveRequest& transfer, Bytes length, Transport& transport) {
  const Request& request = transfer.request;
  Piece& piece = *idle_.back();
  idle_.pop_back();
  piece.transfer = &transfer;
  piece.refusals = 0;
  piece.started = now_;
  piece.stalled = false;
  piece.direction = request.direction;
  piece.descriptor = request.file->descriptor();
  piece.data = request.memory.data() + transfer.cut;
  piece.length = length;
  piece.offset = request.offset + transfer.cut;

  Backlog& queue = backlog(transfer);
  transfer.cut += length;
  ++transfer.in_flight;
  in_flight_bytes_ += length;
  if (transfer.cut == transfer.completion.length) queue.pop_front();
  transport.start(piece);
}

void Dispatcher::finish(Piece& piece, Transport& transport) {
  ActiveRequest& transfer = *piece.transfer;
  if (transfer.abandoned) return retire(piece);
  if (piece.result == -EINTR) return restart(piece, transport);
  if (piece.result == -EAGAIN && ++piece.refusals < kMaxRefusals) {
    std::this_thread::sleep_for(kRefusalPause);
    return restart(piece, transport);
  }
  if (piece.result < 0) {
    fail(transfer, static_cast<int>(-piece.result));
    return retire(piece);
  }
  piece.refusals = 0;

  // The rest must start aligned, so a partial granule is transferred again. Progress of less than
  // one granule means the end of the file or a full device.
  auto progress = static_cast<Bytes>(piece.result);
  if (progress < piece.length) progress -= progress % transfer.request.file->alignment();
  if (progress == 0) {
    transfer.completion.end_of_file = piece.direction == Direction::read;
    fail(transfer, EIO);
    return retire(piece);
  }
  piece.data += progress;
  piece.offset += progress;
  piece.length -= progress;
  in_flight_bytes_ -= progress;
  transfer.completion.transferred += progress;
  (piece.direction == Direction::read ? progress_.bytes_read : progress_.bytes_written) += progress;
  if (piece.length == 0) return retire(piece);
  ++progress_.continued;
  restart(piece, transport);
}

void Dispatcher::restart(Piece& piece, Transport& transport) {
  if (cancelled_) {
    fail(*piece.transfer, ECANCELED);
    return retire(piece);
  }
  transport.start(piece);
}

void Dispatcher::retire(Piece& piece) {
  ActiveRequest& transfer = *std::exchange(piece.transfer, nullptr);
  idle_.push_back(&piece);
  in_flight_bytes_ -= piece.length;
  if (piece.stalled) --stalled_;
  ++progress_.blocks;
  --transfer.in_flight;
  if (transfer.in_flight > 0 || transfer.cut < transfer.completion.length) return;
  if (transfer.abandoned) {
    give_back_memory(transfer.request);
    table_.forget(transfer);
  } else {
    ended_.push_back(&transfer);
  }
}

void Dispatcher::fail(ActiveRequest& transfer, int error_number) {
  if (transfer.completion.error_number == 0) transfer.completion.error_number = error_number;
  remove_from_backlog(transfer);
}

/// Detects gaps of more than two ticks, in which this process itself was stopped (SIGSTOP, Ctrl-Z).
/// The device may have answered meanwhile, so they do not count as waiting.
void Dispatcher::look_at_the_clock() {
  const Clock::time_point before = std::exchange(now_, Clock::now());
  const Clock::duration gap = now_ - before;
  if (gap <= 2 * tick_) return;
  for (Piece& piece : pieces_) {
    if (piece.transfer != nullptr) piece.started += gap - tick_;
  }
}

void Dispatcher::watch() {
  if (idle() || now_ - watched_ < tick_) return;
  watched_ = now_;
  for (Piece& piece : pieces_) {
    if (piece.transfer == nullptr) continue;
    const std::chrono::duration<double> age = now_ - piece.started;
    if (age < stall_) continue;
    if (!piece.stalled) {
      piece.stalled = true;
      ++stalled_;
      log(LogLevel::warning, fmt::format("aio: {} has not completed after {:.1f} s; check the "
                                         "drive (dmesg)",
                                         describe(piece.direction, piece.transfer->completion.file,
                                                  piece.offset, piece.length),
                                         age.count()));
    }
    if (age >= abandon_) abandon(piece);
  }
  // No block will complete, so queued requests would wait forever.
  if (!has_room() && only_abandoned_left()) end_backlog(ETIMEDOUT);
}

void Dispatcher::abandon(Piece& piece) {
  ActiveRequest& transfer = *piece.transfer;
  if (transfer.abandoned) return;
  fail(transfer, ETIMEDOUT);
  transfer.abandoned = true;
  ended_.push_back(&transfer);
}

void Dispatcher::settle() {
  for (ActiveRequest* transfer : ended_) {
    transfer->completion.seconds =
        std::chrono::duration<double>(Clock::now() - transfer->submitted).count();
    if (!transfer->abandoned) give_back_memory(transfer->request);
  }
  const bool progress =
      progress_.blocks + progress_.bytes_read + progress_.bytes_written + progress_.batches > 0;
  if (ended_.empty() && !progress) return;
  table_.end(ended_, std::exchange(progress_, {}));
  ended_.clear();
}

bool Dispatcher::has_room() const {
  if (idle_.empty()) return false;
  const ActiveRequest* const transfer = next_transfer();
  const Bytes next = transfer == nullptr ? 1 : next_length(*transfer);
  return in_flight_bytes_ == 0 || in_flight_bytes_ + next <= in_flight_limit_;
}

bool Dispatcher::backlog_empty() const {
  return waited_.empty() && ahead_.empty() && writes_.empty();
}

unsigned Dispatcher::wanted() const {
  if (backlog_empty()) return 1;
  const auto moving = static_cast<unsigned>(pieces_.size() - idle_.size()) - stalled_;
  return std::clamp(moving / 2, 1U, kBatch);
}

bool Dispatcher::only_abandoned_left() const {
  return std::all_of(pieces_.begin(), pieces_.end(), [](const Piece& piece) {
    return piece.transfer == nullptr || piece.transfer->abandoned;
  });
}

void Dispatcher::park_unanswered() {
  for (const Piece& piece : pieces_) {
    if (piece.transfer == nullptr) continue;
    park(std::exchange(piece.transfer->request.returned, nullptr));
  }
}

BlockQueue::BlockQueue(std::string backend, const QueueOptions& options,
                       MakeTransport make_transport)
    : backend_(std::move(backend)), work_(std::make_shared<Work>(options)) {
  std::promise<void> ready;
  auto outcome = ready.get_future();
  try {
    owner_ = std::thread([work = work_, depth = options.depth, &ready, &make_transport]() mutable {
      pthread_setname_np(pthread_self(), "aio-owner");
      try {
        work->transport = make_transport(depth);
      } catch (...) {
        ready.set_exception(std::current_exception());
        return;
      }
      work->table.set_transport(work->transport.get());
      ready.set_value();
      serve(std::move(work));
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
  if (work_->table.stop()) {
    owner_.join();
  } else {
    // The kernel may keep the thread until the device answers.
    owner_.detach();
  }
}

void BlockQueue::serve(std::shared_ptr<Work> work) {
  RequestTable& table = work->table;
  if (work->dispatcher.run(*work->transport)) {
    table.set_transport(nullptr);
    work->transport.reset();
    return table.finish(RequestTable::Ending::complete);
  }
  // Blocks still at the device refer to this state, so it is never freed.
  static auto* const parked = new std::vector<std::shared_ptr<Work>>;
  static std::mutex mutex;
  {
    const std::scoped_lock lock(mutex);
    parked->push_back(std::move(work));
  }
  table.finish(RequestTable::Ending::parked);
}

}  // namespace ballast::aio
