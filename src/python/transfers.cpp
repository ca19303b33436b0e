#include "src/python/transfers.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <utility>

#include <fmt/format.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ballast/core/error.h"
#include "ballast/core/units.h"

#include "src/python/module.h"

namespace ballast::python {

namespace {

using aio::Direction;

using Clock = std::chrono::steady_clock;

/// The queue abandons blocks that do not come back, and reports that only to wait().
constexpr auto kPatience = std::chrono::seconds(1);
const std::chrono::duration<double> kAbandoned(aio::QueueOptions().abandon_seconds + 10.0);

std::size_t index(TransferMode way) {
  return static_cast<std::size_t>(way);
}

std::size_t other(TransferMode way) {
  return index(way == TransferMode::direct ? TransferMode::buffered : TransferMode::direct);
}

std::mutex& singleton_mutex() {
  static std::mutex mutex;
  return mutex;
}

/// The only instance. Transfers::end() destroys it, not the end of the process.
Transfers*& singleton() {
  static Transfers* transfers = nullptr;
  return transfers;
}

bool& ended() {
  static bool flag = false;
  return flag;
}

}  // namespace

Wakeup::Wakeup() : descriptor_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (descriptor_.is_open()) return;
  throw Error(ErrorCategory::io, "cannot make an eventfd for the event loop", errno);
}

void Wakeup::signal() const noexcept {
  const std::uint64_t one = 1;
  // Fails only if the counter is full. Then the reader is awake anyway.
  if (::write(descriptor_.number(), &one, sizeof one) < 0) return;
}

Transfers& Transfers::get() {
  refuse_after_fork();
  const std::scoped_lock lock(singleton_mutex());
  if (ended()) {
    throw Error(ErrorCategory::state, "ballast.aio: the interpreter ends; no transfer can start");
  }
  if (singleton() == nullptr) {
    singleton() = new Transfers;
    note_threads();
  }
  return *singleton();
}

Transfers* Transfers::existing() {
  refuse_after_fork();
  const std::scoped_lock lock(singleton_mutex());
  return singleton();
}

void Transfers::end() {
  if (lost_threads()) return;
  Transfers* last = nullptr;
  {
    const std::scoped_lock lock(singleton_mutex());
    ended() = true;
    last = std::exchange(singleton(), nullptr);
  }
  delete last;
}

Transfers::Transfers() : queue_(aio::make_queue({})), collector_([this] { collect(); }) {}

Transfers::~Transfers() {
  {
    const std::scoped_lock lock(returned_mutex_);
    ending_ = true;
  }
  any_returned_.notify_one();
  collector_.join();
}

void Transfers::submit(const std::shared_ptr<PythonTransfer>& transfer) {
  const std::scoped_lock lock(mutex_);
  FileTransfers& file = *transfer->file;
  const bool waits = transfer->direction == Direction::write &&
                     (!file.waiting.empty() || file.writes[other(transfer->way)] > 0);
  if (waits) {
    file.waiting.push_back(transfer);
  } else {
    launch(transfer);
  }
  ++file.unfinished;
  ++unfinished_;
}

void Transfers::launch(const std::shared_ptr<PythonTransfer>& transfer) {
  aio::Request request = {.direction = transfer->direction,
                          .file = transfer->opened.get(),
                          .offset = transfer->offset,
                          .memory = transfer->memory,
                          .ahead = false,
                          .returned = [this, transfer] {
                            {
                              const std::scoped_lock lock(returned_mutex_);
                              returned_.push_back(transfer);
                            }
                            any_returned_.notify_one();
                          }};
  transfer->begun = Clock::now();
  in_flight_.insert(transfer);
  try {
    transfer->ticket = queue_->submit(std::move(request));
  } catch (...) {
    in_flight_.erase(transfer);
    throw;
  }
  if (transfer->direction == Direction::write) {
    ++transfer->file->writes[index(transfer->way)];
  }
}

void Transfers::collect() {
  for (;;) {
    std::vector<std::shared_ptr<PythonTransfer>> finished;
    bool ending = false;
    {
      std::unique_lock lock(returned_mutex_);
      any_returned_.wait_for(lock, kPatience, [this] { return ending_ || !returned_.empty(); });
      finished.swap(returned_);
      ending = ending_;
    }
    {
      const std::scoped_lock lock(mutex_);
      if (ending && unfinished_ == 0) return;
      if (finished.empty()) add_late(finished, ending);
      std::erase_if(finished,
                    [this](const auto& transfer) { return !in_flight_.contains(transfer); });
    }
    for (const auto& transfer : finished) {
      aio::Completion completion = queue_->wait(transfer->ticket);
      const std::scoped_lock lock(mutex_);
      in_flight_.erase(transfer);
      if (transfer->direction == Direction::write) --transfer->file->writes[index(transfer->way)];
      const std::shared_ptr<FileTransfers> file = transfer->file;
      finish(*transfer, std::move(completion));
      start_waiting(*file);
    }
  }
}

void Transfers::add_late(std::vector<std::shared_ptr<PythonTransfer>>& finished, bool all) const {
  const auto now = Clock::now();
  for (const auto& transfer : in_flight_) {
    if (all || now - transfer->begun > kAbandoned) finished.push_back(transfer);
  }
}

void Transfers::finish(PythonTransfer& transfer, aio::Completion completion) {
  transfer.completion = std::move(completion);
  transfer.done = true;
  transfer.ended.notify_all();
  for (const auto& wakeup : std::exchange(transfer.wakeups, {})) wakeup->signal();
  // After ETIMEDOUT the device may still use the memory, which is kept until the queue returns it.
  if (transfer.completion.error_number != ETIMEDOUT) transfer.memory_owner.reset();
  transfer.opened.reset();
  const std::shared_ptr<FileTransfers> file = std::move(transfer.file);
  --unfinished_;
  if (--file->unfinished == 0) file_idle_.notify_all();
}

void Transfers::start_waiting(FileTransfers& file) {
  while (!file.waiting.empty()) {
    const std::shared_ptr<PythonTransfer> next = file.waiting.front();
    if (file.writes[other(next->way)] > 0) return;
    file.waiting.pop_front();
    try {
      launch(next);
    } catch (const std::exception&) {
      finish(*next, {.direction = next->direction,
                     .error_number = ENOMEM,
                     .end_of_file = false,
                     .transferred = 0,
                     .offset = next->offset,
                     .length = next->memory.size(),
                     .seconds = 0.0,
                     .file = next->opened->name()});
    }
  }
}

bool Transfers::done(const PythonTransfer& transfer) {
  const std::scoped_lock lock(mutex_);
  return transfer.done;
}

bool Transfers::wait(PythonTransfer& transfer, std::chrono::duration<double> most) {
  std::unique_lock lock(mutex_);
  return transfer.ended.wait_for(lock, most, [&transfer] { return transfer.done; });
}

void Transfers::notify(PythonTransfer& transfer, const std::shared_ptr<Wakeup>& wakeup) {
  const std::scoped_lock lock(mutex_);
  if (transfer.done) return wakeup->signal();
  transfer.wakeups.push_back(wakeup);
}

bool Transfers::wait(FileTransfers& file, std::chrono::duration<double> most) {
  std::unique_lock lock(mutex_);
  return file_idle_.wait_for(lock, most, [&file] { return file.unfinished == 0; });
}

namespace {

using Access = aio::File::Access;
using Handle = std::shared_ptr<const aio::File>;

Bytes size_now(const aio::File& file) {
  struct stat status {};
  if (fstat(file.descriptor(), &status) == 0) return static_cast<Bytes>(status.st_size);
  throw Error(ErrorCategory::io, file.name() + ": cannot read the file's status", errno);
}

bool is_direct(const aio::File& file) {
  return file.alignment() > 1;
}

/// Null if the file system has no direct I/O for whole pages.
Handle direct_twin(const aio::File& file, bool writable) {
  try {
    aio::File twin = file.reopened(writable, Access::direct);
    if (kPage % twin.alignment() != 0) return nullptr;
    return std::make_shared<const aio::File>(std::move(twin));
  } catch (const Error&) {
    return nullptr;
  }
}

}  // namespace

SharedFile::SharedFile(const std::filesystem::path& path, Mode mode, std::optional<Bytes> size)
    : path_(path.string()), mode_(mode) {
  if (mode == Mode::create) {
    buffered_ = std::make_shared<const aio::File>(aio::File::create(path, size.value_or(0)));
    direct_ = direct_twin(*buffered_, true);
  } else {
    auto file = std::make_shared<const aio::File>(aio::File::open_for_pages(path, writable()));
    (is_direct(*file) ? direct_ : buffered_) = std::move(file);
  }
  has_direct_ = direct_ != nullptr;
  size_ = any().size();
  if (mode == Mode::read_write && size && *size != size_) {
    any().resize(*size);
    reopen();
  }
}

void SharedFile::require_open() const {
  if (closed_) throw Error(ErrorCategory::usage, path_ + ": the file is closed");
}

void SharedFile::reopen() {
  const Access access = direct_ ? Access::direct : Access::buffered;
  auto file = std::make_shared<const aio::File>(any().reopened(writable(), access));
  size_ = file->size();
  buffered_ = access == Access::buffered ? file : nullptr;
  if (access == Access::direct) direct_ = std::move(file);
}

void SharedFile::reach(aio::Direction direction, Bytes offset, Bytes end) {
  if (end <= size_) return;
  // Other programs may have changed it.
  const Bytes now = size_now(any());
  if (end > now) {
    if (direction == aio::Direction::read) {
      throw Error(ErrorCategory::usage,
                  fmt::format("offset: {} bytes at {} end after {}, which has {} bytes",
                              end - offset, offset, path_, now));
    }
    any().resize(end);
  }
  reopen();
}

const Handle& SharedFile::opened(TransferMode way) {
  if (way == TransferMode::direct) return direct_;
  if (!buffered_) {
    buffered_ = std::make_shared<const aio::File>(direct_->reopened(writable(), Access::buffered));
    size_ = std::min(size_, buffered_->size());  // other programs may have truncated it
  }
  return buffered_;
}

TransferMode SharedFile::way_for(Bytes offset, HostBytes memory) const {
  if (!direct_ || offset % kPage != 0 || memory.size() % kPage != 0) return TransferMode::buffered;
  const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
  return address % direct_->alignment() == 0 ? TransferMode::direct : TransferMode::buffered;
}

std::shared_ptr<PythonTransfer> SharedFile::start(aio::Direction direction, Bytes offset,
                                                  HostBytes memory, std::shared_ptr<void> owner) {
  Transfers& transfers = Transfers::get();
  const std::scoped_lock lock(mutex_);
  require_open();
  if (direction == aio::Direction::write && !writable()) {
    throw Error(
        ErrorCategory::usage,
        fmt::format("mode: {} is open for reading; open it with mode \"r+\" or \"w\"", path_));
  }
  constexpr Bytes kLargest = Bytes{1} << 62U;
  if (offset > kLargest || memory.size() > kLargest) {
    throw Error(ErrorCategory::usage, fmt::format("offset: {} is too large", offset));
  }
  auto transfer = std::make_shared<PythonTransfer>();
  transfer->direction = direction;
  transfer->offset = offset;
  transfer->memory = memory;
  if (memory.empty()) {
    transfer->done = true;
    return transfer;
  }
  reach(direction, offset, offset + memory.size());
  transfer->way = way_for(offset, memory);
  transfer->memory_owner = std::move(owner);
  transfer->file = {shared_from_this(), &transfers_};
  transfer->opened = opened(transfer->way);
  if (transfer->opened->size() < offset + memory.size()) {
    reach(direction, offset, offset + memory.size());
    transfer->opened = opened(transfer->way);
  }
  transfers.submit(transfer);
  return transfer;
}

void SharedFile::close() {
  const std::scoped_lock lock(mutex_);
  closed_ = true;
}

void SharedFile::release() {
  const std::scoped_lock lock(mutex_);
  direct_.reset();
  buffered_.reset();
}

void SharedFile::sync() {
  Handle file;
  {
    const std::scoped_lock lock(mutex_);
    require_open();
    file = direct_ ? direct_ : buffered_;
  }
  file->sync();
}

bool SharedFile::closed() {
  const std::scoped_lock lock(mutex_);
  return closed_;
}

Bytes SharedFile::size() {
  const std::scoped_lock lock(mutex_);
  return size_;
}

}  // namespace ballast::python
