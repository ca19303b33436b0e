#include "aio/transport.h"

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <limits>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include <pthread.h>
#include <unistd.h>

#include "ballast/core/error.h"

namespace ballast::aio {

namespace {

class ThreadTransport final : public Transport {
 public:
  explicit ThreadTransport(unsigned depth) {
    try {
      for (unsigned i = 0; i < depth; ++i) {
        workers_.emplace_back([this] { work(); });
      }
    } catch (const std::system_error& error) {
      stop();
      throw Error(ErrorCategory::io, "cannot start the I/O threads; lower the queue depth",
                  error.code().value());
    }
  }
  ~ThreadTransport() override { stop(); }

  void start(Block& block) override {
    {
      const std::scoped_lock lock(mutex_);
      started_.push_back(&block);
    }
    has_started_.notify_one();
  }

  void reap(std::vector<Block*>& finished, unsigned wanted,
            std::chrono::milliseconds patience) override {
    std::unique_lock lock(mutex_);
    wanted_ = wanted;
    has_finished_.wait_for(lock, patience, [&] { return woken_ || done_.size() >= wanted; });
    wanted_ = std::numeric_limits<std::size_t>::max();
    woken_ = false;
    finished.insert(finished.end(), done_.begin(), done_.end());
    done_.clear();
  }

  void wake() noexcept override {
    const std::scoped_lock lock(mutex_);
    woken_ = true;
    has_finished_.notify_one();
  }

 private:
  void work() {
    pthread_setname_np(pthread_self(), "aio-worker");
    std::unique_lock lock(mutex_);
    while (true) {
      has_started_.wait(lock, [&] { return stopping_ || !started_.empty(); });
      if (started_.empty()) return;
      Block& block = *started_.front();
      started_.pop_front();
      lock.unlock();
      const auto position = static_cast<off_t>(block.offset);
      const ssize_t moved = block.direction == Direction::read
                                ? pread(block.descriptor, block.data, block.length, position)
                                : pwrite(block.descriptor, block.data, block.length, position);
      block.result = moved < 0 ? -errno : moved;
      lock.lock();
      done_.push_back(&block);
      if (done_.size() >= wanted_) has_finished_.notify_one();
    }
  }

  void stop() {
    {
      const std::scoped_lock lock(mutex_);
      stopping_ = true;
    }
    has_started_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  std::mutex mutex_;
  std::condition_variable has_started_;
  std::condition_variable has_finished_;
  std::deque<Block*> started_;
  std::vector<Block*> done_;
  std::size_t wanted_ = std::numeric_limits<std::size_t>::max();  ///< set by the sleeping reap()
  bool woken_ = false;
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace

std::unique_ptr<Transport> make_thread_transport(unsigned depth) {
  return std::make_unique<ThreadTransport>(depth);
}

namespace {

class NullTransport final : public Transport {
 public:
  void start(Block& block) override {
    block.result = static_cast<long>(block.length);
    done_.push_back(&block);
  }

  void reap(std::vector<Block*>& finished, unsigned /*wanted*/,
            std::chrono::milliseconds patience) override {
    {
      std::unique_lock lock(mutex_);
      if (done_.empty()) woken_changed_.wait_for(lock, patience, [&] { return woken_; });
      woken_ = false;
    }
    finished.insert(finished.end(), done_.begin(), done_.end());
    done_.clear();
  }

  void wake() noexcept override {
    {
      const std::scoped_lock lock(mutex_);
      woken_ = true;
    }
    woken_changed_.notify_one();
  }

 private:
  std::vector<Block*> done_;  ///< used by the owner thread
  std::mutex mutex_;
  std::condition_variable woken_changed_;
  bool woken_ = false;
};

}  // namespace

std::unique_ptr<Transport> make_null_transport() {
  return std::make_unique<NullTransport>();
}

}  // namespace ballast::aio
