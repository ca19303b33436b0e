#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <omp.h>
#include <pthread.h>

#include "ballast/core/error.h"
#include "ballast/core/machine.h"
#include "ballast/core/memory.h"
#include "ballast/device/device.h"
#include "ballast/device/streams.h"

#include "src/device/implementations.h"

namespace ballast::device {

HostStream::HostStream(const std::string& name, int compute_threads)
    : thread_([this, compute_threads] { run(compute_threads); }) {
  pthread_setname_np(thread_.native_handle(), name.substr(0, 15).c_str());
}

HostStream::~HostStream() {
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
  }
  added_.notify_one();
  thread_.join();
}

void HostStream::enqueue(std::function<void()> work) {
  if (std::this_thread::get_id() == thread_.get_id()) return work();
  {
    const std::scoped_lock lock(mutex_);
    work_.push_back(std::move(work));
    ++enqueued_;
  }
  added_.notify_one();
}

void HostStream::synchronize() {
  wait_until(enqueued());
  std::exception_ptr failure;
  {
    const std::scoped_lock lock(mutex_);
    failure = std::exchange(failure_, nullptr);
  }
  if (failure) std::rethrow_exception(failure);
}

std::uint64_t HostStream::enqueued() const {
  const std::scoped_lock lock(mutex_);
  return enqueued_;
}

void HostStream::wait_until(std::uint64_t count) const {
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [&] { return finished_ >= count; });
}

void HostStream::throw_failure_within(std::uint64_t count) const {
  const std::scoped_lock lock(mutex_);
  if (failure_ && failed_ <= count) std::rethrow_exception(failure_);
}

void HostStream::run(int compute_threads) {
  omp_set_dynamic(0);
  omp_set_num_threads(std::max(1, compute_threads));
  std::unique_lock lock(mutex_);
  while (true) {
    added_.wait(lock, [&] { return stopping_ || !work_.empty(); });
    if (work_.empty()) return;
    auto work = std::move(work_.front());
    work_.pop_front();
    const bool skip = failure_ != nullptr;
    lock.unlock();
    std::exception_ptr failure;
    if (!skip) {
      try {
        work();
      } catch (...) {
        failure = std::current_exception();
      }
    }
    work = nullptr;
    lock.lock();
    ++finished_;
    if (failure) {
      failure_ = failure;
      failed_ = finished_;
    }
    lock.unlock();
    ended_.notify_all();
    lock.lock();
  }
}

HostStream& as_host(Stream& stream) {
  auto* host = dynamic_cast<HostStream*>(&stream);
  expects(host != nullptr, "the host device was given a stream of another device");
  return *host;
}

namespace {

class HostEvent final : public Event {
 public:
  void record(Stream& stream) override {
    const std::scoped_lock lock(mutex_);
    stream_ = &as_host(stream);
    count_ = stream_->enqueued();
  }
  void wait_on(Stream& stream) override {
    const auto [source, count] = recorded();
    if (source == nullptr || source == &stream) return;
    as_host(stream).enqueue([source = source, count = count] { source->wait_until(count); });
  }
  void synchronize() override {
    const auto [source, count] = recorded();
    if (source == nullptr) return;
    source->wait_until(count);
    source->throw_failure_within(count);
  }

 private:
  struct Mark {
    HostStream* stream;
    std::uint64_t count;
  };
  Mark recorded() {
    const std::scoped_lock lock(mutex_);
    return {stream_, count_};
  }

  std::mutex mutex_;
  HostStream* stream_ = nullptr;
  std::uint64_t count_ = 0;
};

/// The host device copies any memory equally fast, so nothing needs to be pinned.
class NothingPinned final : public Pin {};

/// Stands in for a GPU: `budget` bytes of address space, zeroed by the kernel.
class HostDevice final : public Device {
 public:
  explicit HostDevice(const DeviceOptions& options)
      : arena_(options.budget, "memory of the host device (ballast.device_bytes)"),
        memory_({arena_.bytes().data(), arena_.bytes().size()}),
        threads_(options.compute_threads > 0 ? options.compute_threads : default_compute_threads()),
        link_gbps_(options.link_gbps) {
    if (options.budget == 0)
      throw Error(ErrorCategory::memory, "ballast.device_bytes is 0; raise it");
  }

  std::string_view kind() const override { return "host"; }
  std::string description() const override {
    return fmt::format("host device, {}, {} thread{}", cpu_name(), threads_,
                       threads_ == 1 ? "" : "s");
  }

  DeviceBytes allocate(Bytes bytes, std::string_view what) override {
    return memory_.take(bytes, what);
  }
  Bytes budget() const override { return memory_.budget(); }
  Bytes allocated() const override { return memory_.taken(); }

  std::unique_ptr<Stream> make_stream(std::string_view name) override {
    return std::make_unique<HostStream>(std::string(name), threads_);
  }
  std::unique_ptr<Event> make_event() override { return std::make_unique<HostEvent>(); }

  std::unique_ptr<Pin> pin(HostBytes, std::string_view) override {
    return std::make_unique<NothingPinned>();
  }

  void copy_to_device(Stream& stream, DeviceBytes to, ConstHostBytes from) override {
    expects(to.size() == from.size(), "copy_to_device: sizes differ");
    enqueue_copy(stream, to.raw(), from.data(), from.size());
  }
  void copy_to_host(Stream& stream, HostBytes to, ConstDeviceBytes from) override {
    expects(to.size() == from.size(), "copy_to_host: sizes differ");
    enqueue_copy(stream, to.data(), from.raw(), from.size());
  }
  bool connect(Device&) override { return true; }
  void copy_to_other(Stream& stream, Device&, DeviceBytes to, ConstDeviceBytes from) override {
    expects(to.size() == from.size(), "copy_to_other: sizes differ");
    enqueue_copy(stream, to.raw(), from.raw(), from.size());
  }

 private:
  void enqueue_copy(Stream& stream, std::byte* to, const std::byte* from, Bytes bytes) const {
    as_host(stream).enqueue([this, to, from, bytes] {
      const auto start = std::chrono::steady_clock::now();
      if (bytes != 0) std::memcpy(to, from, bytes);
      if (link_gbps_ > 0.0) {
        const double seconds = static_cast<double>(bytes) / (link_gbps_ * 1e9);
        std::this_thread::sleep_until(start + std::chrono::duration<double>(seconds));
      }
    });
  }

  Mapping arena_;
  DeviceMemory memory_;
  int threads_;
  double link_gbps_;
};

}  // namespace

int default_compute_threads() {
  return std::clamp(omp_get_max_threads(), 1, usable_cpus());
}

std::unique_ptr<Device> make_host_device(const DeviceOptions& options) {
  return std::make_unique<HostDevice>(options);
}

namespace {

/// Copies between two buffers, because the memory of the host device is ordinary memory.
class Memcpy {
 public:
  explicit Memcpy(Bytes bytes)
      : bytes_(bytes), from_(bytes, "plain copies"), to_(bytes, "plain copies") {
    // Unwritten pages would all be read from one page of zeros.
    std::fill(from_.bytes().begin(), from_.bytes().end(), std::byte{1});
    std::fill(to_.bytes().begin(), to_.bytes().end(), std::byte{2});
  }

  void run(std::size_t count) const {
    for (std::size_t i = 0; i < count; ++i) {
      std::memcpy(to_.bytes().data(), from_.bytes().data(), bytes_);
    }
  }

 private:
  Bytes bytes_;
  Mapping from_;
  Mapping to_;
};

class HostPlainCopies final : public PlainCopies {
 public:
  explicit HostPlainCopies(Bytes bytes) : up_(bytes), down_(bytes) {}

  void run(CopyWay way, std::size_t count) override {
    if (way == CopyWay::up) return up_.run(count);
    if (way == CopyWay::down) return down_.run(count);
    std::thread other([&] { down_.run(count); });
    up_.run(count);
    other.join();
  }

 private:
  Memcpy up_;
  Memcpy down_;
};

}  // namespace

std::unique_ptr<PlainCopies> make_host_plain_copies(Bytes bytes) {
  return std::make_unique<HostPlainCopies>(bytes);
}

}  // namespace ballast::device
