#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "ballast/aio/queue.h"
#include "ballast/core/error.h"

#include "aio/transport.h"

namespace ballast::aio {

/// An io_uring instance with the best setup flags that the kernel supports. Made, used and
/// destroyed by one thread (IORING_SETUP_SINGLE_ISSUER).
class Ring {
 public:
  struct Polling {
    bool submissions = false;  ///< IORING_SETUP_SQPOLL
    bool completions = false;  ///< IORING_SETUP_IOPOLL
  };

  /// Room for `entries` submissions. Throws Error(io) with the reason when the kernel refuses or
  /// lacks an operation that transfers need.
  Ring(unsigned entries, Polling polling);
  explicit Ring(unsigned entries) : Ring(entries, Polling()) {}
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  [[nodiscard]] io_uring* get() { return &ring_; }
  /// "kernel 6.1, SINGLE_ISSUER DEFER_TASKRUN COOP_TASKRUN".
  [[nodiscard]] std::string description() const;

 private:
  void require_operations();

  io_uring ring_{};
  std::string flags_;
};

/// Files and memory registered with a ring (io_uring_register(2)), which saves looking up files and
/// pinning memory at every transfer.
class RegisteredResources {
 public:
  /// Registers files and memory; logs one line for each kind that the kernel refuses.
  RegisteredResources(Ring& ring, const Registration& registration);

  /// Number of the file in the ring's table, or -1.
  [[nodiscard]] int file(int descriptor) const;
  /// Number of the buffer that holds all of [data, data + length), or -1.
  [[nodiscard]] int buffer(const std::byte* data, std::size_t length) const;

 private:
  std::vector<int> files_;
  std::vector<HostBytes> buffers_;  ///< by address
};

namespace {

struct FlagSet {
  unsigned flags;
  std::string_view names;
};

/// Sets of flags, from the newest kernels (6.1) to the oldest. All keep completion work on the
/// owner thread.
constexpr std::array<FlagSet, 4> kFlagSets = {{
    {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_COOP_TASKRUN,
     "SINGLE_ISSUER DEFER_TASKRUN COOP_TASKRUN"},
    {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_COOP_TASKRUN, "SINGLE_ISSUER COOP_TASKRUN"},
    {IORING_SETUP_COOP_TASKRUN, "COOP_TASKRUN"},
    {0, "no setup flags"},
}};

/// With a submitting kernel thread there is no task work for the owner thread.
constexpr std::array<FlagSet, 2> kSubmissionPollingSets = {{
    {IORING_SETUP_SQPOLL | IORING_SETUP_SINGLE_ISSUER, "SQPOLL SINGLE_ISSUER"},
    {IORING_SETUP_SQPOLL, "SQPOLL"},
}};

/// After this long without work the submitting kernel thread sleeps.
constexpr unsigned kSubmitterIdleMilliseconds = 50;

constexpr std::array<std::pair<int, std::string_view>, 4> kOperations = {{
    {IORING_OP_READ, "IORING_OP_READ"},
    {IORING_OP_WRITE, "IORING_OP_WRITE"},
    {IORING_OP_READ_FIXED, "IORING_OP_READ_FIXED"},
    {IORING_OP_WRITE_FIXED, "IORING_OP_WRITE_FIXED"},
}};

std::string explain_refusal(int error_number) {
  switch (error_number) {
    case EPERM:
    case EACCES:
      return "denied by seccomp or kernel.io_uring_disabled";
    case ENOSYS:
      return "the kernel has no io_uring, or seccomp hides it";
    case ENOMEM:
      return "not enough memory for the ring; raise RLIMIT_MEMLOCK (ulimit -l) or lower the depth";
    case EMFILE:
    case ENFILE:
      return "out of file descriptors; raise ulimit -n";
    default:
      return "the kernel refused the ring";
  }
}

std::string explain_unpinned(int error_number) {
  rlimit limit{};
  if (error_number == ENOMEM && getrlimit(RLIMIT_MEMLOCK, &limit) == 0 &&
      limit.rlim_cur != RLIM_INFINITY) {
    return fmt::format("the limit on locked memory is {}; raise it (ulimit -l)",
                       format_bytes(limit.rlim_cur));
  }
  return strerror(error_number);
}

/// io_uring_register(2): at most 1 GiB per buffer.
constexpr Bytes kLargestBuffer = 1 * kGiB;

std::string kernel_version() {
  utsname names{};
  if (uname(&names) != 0) return "kernel of unknown version";
  const std::string_view release = names.release;
  return fmt::format("kernel {}", release.substr(0, release.find_first_not_of("0123456789.")));
}

}  // namespace

Ring::Ring(unsigned entries, Polling polling) {
  int status = -EINVAL;
  const std::span<const FlagSet> sets =
      polling.submissions ? std::span<const FlagSet>(kSubmissionPollingSets) : kFlagSets;
  for (const FlagSet& set : sets) {
    io_uring_params parameters{};
    parameters.flags = set.flags | (polling.completions ? IORING_SETUP_IOPOLL : 0U);
    parameters.sq_thread_idle = kSubmitterIdleMilliseconds;
    status = io_uring_queue_init_params(entries, &ring_, &parameters);
    flags_ = std::string(set.names) + (polling.completions ? " IOPOLL" : "");
    if (status != -EINVAL) break;
  }
  if (status < 0) {
    throw Error(ErrorCategory::io, "io_uring_setup: " + explain_refusal(-status), -status);
  }
  require_operations();
}

void Ring::require_operations() {
  const std::unique_ptr<io_uring_probe, decltype(&io_uring_free_probe)> probe(
      io_uring_get_probe_ring(&ring_), &io_uring_free_probe);
  std::string lacking;
  for (const auto& [operation, name] : kOperations) {
    if (probe == nullptr || io_uring_opcode_supported(probe.get(), operation) == 0) lacking = name;
  }
  // The timeout of a wait (kernel 5.11).
  if ((ring_.features & IORING_FEAT_EXT_ARG) == 0U) lacking = "IORING_FEAT_EXT_ARG";
  if (lacking.empty()) return;
  io_uring_queue_exit(&ring_);
  throw Error(ErrorCategory::io, fmt::format("{} lacks {}", kernel_version(), lacking));
}

Ring::~Ring() {
  io_uring_queue_exit(&ring_);
}

std::string Ring::description() const {
  return fmt::format("{}, {}", kernel_version(), flags_);
}

RegisteredResources::RegisteredResources(Ring& ring, const Registration& registration) {
  for (const File* file : registration.files) files_.push_back(file->descriptor());
  if (!files_.empty()) {
    const int status =
        io_uring_register_files(ring.get(), files_.data(), static_cast<unsigned>(files_.size()));
    if (status < 0) {
      log(LogLevel::info,
          fmt::format("aio: cannot register files with io_uring: {}", strerror(-status)));
      files_.clear();
    }
  }
  for (HostBytes memory : registration.memory) {
    while (!memory.empty()) {
      const HostBytes slice = memory.first(std::min<std::size_t>(memory.size(), kLargestBuffer));
      buffers_.push_back(slice);
      memory = memory.subspan(slice.size());
    }
  }
  if (buffers_.empty()) return;
  std::sort(buffers_.begin(), buffers_.end(),
            [](HostBytes a, HostBytes b) { return std::less<>()(a.data(), b.data()); });
  std::vector<iovec> vectors;
  Bytes total = 0;
  for (const HostBytes buffer : buffers_) {
    vectors.push_back({buffer.data(), buffer.size()});
    total += buffer.size();
  }
  const int status =
      io_uring_register_buffers(ring.get(), vectors.data(), static_cast<unsigned>(vectors.size()));
  if (status == 0) return;
  buffers_.clear();
  log(LogLevel::info,
      fmt::format("aio: cannot register {} of buffers with io_uring, which costs some CPU "
                  "time: {}",
                  format_bytes(total), explain_unpinned(-status)));
}

int RegisteredResources::file(int descriptor) const {
  const auto found = std::find(files_.begin(), files_.end(), descriptor);
  return found == files_.end() ? -1 : static_cast<int>(found - files_.begin());
}

int RegisteredResources::buffer(const std::byte* data, std::size_t length) const {
  auto after = std::upper_bound(
      buffers_.begin(), buffers_.end(), data,
      [](const std::byte* at, HostBytes buffer) { return std::less<>()(at, buffer.data()); });
  if (after == buffers_.begin()) return -1;
  const HostBytes buffer = *--after;
  const auto offset = static_cast<std::size_t>(data - buffer.data());
  if (offset >= buffer.size() || length > buffer.size() - offset) return -1;
  return static_cast<int>(after - buffers_.begin());
}

namespace {

/// Pause before retrying when the kernel lacks resources.
constexpr auto kPause = std::chrono::microseconds(100);
constexpr auto kBrokenPoll = std::chrono::milliseconds(1);

/// An eventfd that wakes the sleeping owner thread through a read queued in the ring.
class WakeEvent {
 public:
  WakeEvent() : descriptor_(eventfd(0, EFD_CLOEXEC)) {
    if (descriptor_ < 0)
      throw Error(ErrorCategory::io, "cannot create the eventfd of the aio thread", errno);
  }
  ~WakeEvent() { close(descriptor_); }
  WakeEvent(const WakeEvent&) = delete;
  WakeEvent& operator=(const WakeEvent&) = delete;

  [[nodiscard]] int descriptor() const { return descriptor_; }
  /// Fails only when the counter is full, which wakes as well.
  void set() noexcept { eventfd_write(descriptor_, 1); }
  /// Waits without a ring for at most `patience`. Returns whether the event was set.
  bool wait(std::chrono::milliseconds patience) noexcept {
    pollfd event{.fd = descriptor_, .events = POLLIN, .revents = 0};
    if (poll(&event, 1, static_cast<int>(patience.count())) <= 0) return false;
    eventfd_t ignored = 0;
    eventfd_read(descriptor_, &ignored);
    return true;
  }

 private:
  int descriptor_;
};

class UringTransport final : public Transport {
 public:
  // One entry more than blocks, for the wake event.
  UringTransport(unsigned depth, const QueueOptions& options, const Registration& registration)
      : polls_(options.iopoll),
        ring_(depth + 1, {.submissions = options.sqpoll, .completions = options.iopoll}),
        registered_(ring_, registration) {
    // Optional: saves the kernel a descriptor lookup per call.
    io_uring_register_ring_fd(ring_.get());
    watch_wake();
  }

  void start(Block& block) override {
    if (broken_ != 0) return refuse(block);
    io_uring_sqe* sqe = next_entry();
    prepare(sqe, block);
    const int file = registered_.file(block.descriptor);
    if (file >= 0) {
      sqe->fd = file;
      sqe->flags |= IOSQE_FIXED_FILE;
    }
    io_uring_sqe_set_data(sqe, &block);
    unsent_.push_back(&block);
    ++in_ring_;
  }

  void reap(std::vector<Block*>& finished, unsigned wanted,
            std::chrono::milliseconds patience) override {
    const std::size_t before = finished.size();
    if (broken_ == 0) {
      if (polls_) {
        poll_completions(wanted, patience);
      } else {
        submit_and_wait(wanted, patience);
      }
    } else if (refused_.empty()) {
      wake_.wait(in_ring_ > 0 ? kBrokenPoll : patience);
    }
    collect(finished);
    in_ring_ -= static_cast<unsigned>(finished.size() - before);
    finished.insert(finished.end(), refused_.begin(), refused_.end());
    refused_.clear();
  }

  void wake() noexcept override {
    woken_.store(true);
    wake_.set();
  }

 private:
  /// Returns a free entry. There always is one: the ring has an entry for each block and the wake
  /// event. But a submitting kernel thread frees the entries of a batch only when it has begun all
  /// of it, and the first block may be back before that.
  io_uring_sqe* next_entry() {
    io_uring_sqe* sqe = io_uring_get_sqe(ring_.get());
    const bool frees_late = (ring_.get()->flags & IORING_SETUP_SQPOLL) != 0;
    while (sqe == nullptr && frees_late && io_uring_sqring_wait(ring_.get()) >= 0) {
      sqe = io_uring_get_sqe(ring_.get());
    }
    expects(sqe != nullptr, "more blocks in flight than the aio queue's depth");
    return sqe;
  }

  void prepare(io_uring_sqe* sqe, const Block& block) const {
    const auto length = static_cast<unsigned>(block.length);
    const int buffer = registered_.buffer(block.data, block.length);
    const bool read = block.direction == Direction::read;
    if (buffer >= 0 && read) {
      io_uring_prep_read_fixed(sqe, block.descriptor, block.data, length, block.offset, buffer);
    } else if (buffer >= 0) {
      io_uring_prep_write_fixed(sqe, block.descriptor, block.data, length, block.offset, buffer);
    } else if (read) {
      io_uring_prep_read(sqe, block.descriptor, block.data, length, block.offset);
    } else {
      io_uring_prep_write(sqe, block.descriptor, block.data, length, block.offset);
    }
  }

  void watch_wake() {
    if (polls_) return;  // a polled ring supports only direct I/O
    io_uring_sqe* sqe = next_entry();
    io_uring_prep_read(sqe, wake_.descriptor(), &wake_count_, sizeof wake_count_, 0);
    io_uring_sqe_set_data(sqe, nullptr);
    unsent_.push_back(nullptr);
  }

  void submit_and_wait(unsigned wanted, std::chrono::milliseconds patience) {
    __kernel_timespec timeout{.tv_sec = patience.count() / 1000,
                              .tv_nsec = patience.count() % 1000 * 1'000'000};
    io_uring_cqe* first = nullptr;
    take_note(io_uring_submit_and_wait_timeout(ring_.get(), &first, wanted, &timeout, nullptr));
  }

  /// With IORING_SETUP_IOPOLL, completions appear only while they are polled for.
  void poll_completions(unsigned wanted, std::chrono::milliseconds patience) {
    if (in_ring_ == 0) {
      wake_.wait(patience);
      woken_.store(false);
      return;
    }
    const auto deadline = std::chrono::steady_clock::now() + patience;
    while (broken_ == 0 && !woken_.exchange(false) && io_uring_cq_ready(ring_.get()) < wanted &&
           std::chrono::steady_clock::now() < deadline) {
      take_note(io_uring_submit_and_get_events(ring_.get()));
    }
  }

  /// Handles the status of a submission.
  void take_note(int status) {
    const io_uring_sq& queue = ring_.get()->sq;
    const unsigned waiting = queue.sqe_tail - __atomic_load_n(queue.khead, __ATOMIC_ACQUIRE);
    unsent_.erase(unsent_.begin(), unsent_.end() - std::min<long>(waiting, std::ssize(unsent_)));
    if (status >= 0 || status == -EINTR || status == -ETIME) return;
    if (status == -EAGAIN || status == -EBUSY || status == -ENOMEM) {
      std::this_thread::sleep_for(kPause);
      return;
    }
    // The ring is unusable (for example denied by a sandbox). Blocks that the kernel has not seen
    // fail; the others are awaited, because the kernel may still write to their memory.
    broken_ = -status;
    for (Block* block : unsent_) {
      if (block == nullptr) continue;
      refuse(*block);
      --in_ring_;
    }
    unsent_.clear();
  }

  void collect(std::vector<Block*>& finished) {
    io_uring_cqe* cqe = nullptr;
    unsigned head = 0;
    unsigned seen = 0;
    bool woken = false;
    io_uring_for_each_cqe(ring_.get(), head, cqe) {
      ++seen;
      auto* block = static_cast<Block*>(io_uring_cqe_get_data(cqe));
      if (block == nullptr) {
        woken = true;
        if (cqe->res < 0) std::this_thread::sleep_for(kPause);
        continue;
      }
      block->result = cqe->res;
      if (polls_ && cqe->res == -EOPNOTSUPP) explain_no_polling();
      finished.push_back(block);
    }
    io_uring_cq_advance(ring_.get(), seen);
    if (woken && broken_ == 0) watch_wake();
  }

  void explain_no_polling() {
    if (std::exchange(explained_, true)) return;
    log(LogLevel::warning,
        "aio: cannot poll for completions: the file is not open for direct I/O, or the "
        "device has no poll queues (NVMe: nvme.poll_queues at boot); set aio.iopoll to false");
  }

  void refuse(Block& block) {
    block.result = -broken_;
    refused_.push_back(&block);
  }

  const bool polls_;
  bool explained_ = false;
  Ring ring_;
  RegisteredResources registered_;
  WakeEvent wake_;
  std::uint64_t wake_count_ = 0;
  std::atomic<bool> woken_ = false;  ///< set by wake() of a polled ring
  /// Blocks given to liburing but not yet to the kernel, in order; null for the wake event.
  std::vector<Block*> unsent_;
  unsigned in_ring_ = 0;  ///< blocks that were given to liburing and are not finished
  /// Blocks that a broken ring could not take, returned by the next reap().
  std::vector<Block*> refused_;
  /// errno that made the ring useless, or 0.
  int broken_ = 0;
};

}  // namespace

std::string probe_uring() {
  return Ring(4).description();
}

std::unique_ptr<Transport> make_uring_transport(unsigned depth, const QueueOptions& options,
                                                const Registration& registration) {
  return std::make_unique<UringTransport>(depth, options, registration);
}

}  // namespace ballast::aio
