#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "ballast/core/error.h"
#include "ballast/core/log.h"

#include "aio/backends.h"
#include "aio/uring/ring.h"

namespace ballast::aio {
namespace {

/// Pause before retrying when the kernel lacks resources.
constexpr auto kPause = std::chrono::microseconds(100);
constexpr auto kBrokenPoll = std::chrono::milliseconds(1);

/// An eventfd that wakes the sleeping owner thread through a read queued in the ring.
class WakeEvent {
 public:
  WakeEvent() : descriptor_(eventfd(0, EFD_CLOEXEC)) {
    if (descriptor_ < 0) throw Error(ErrorCategory::io, "eventfd for the aio owner thread", errno);
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
