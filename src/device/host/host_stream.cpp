#include "ballast/device/host_stream.h"

#include <algorithm>
#include <utility>

#include <omp.h>
#include <pthread.h>

#include "ballast/core/error.h"

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

}  // namespace ballast::device
