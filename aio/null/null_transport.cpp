#include <condition_variable>
#include <mutex>

#include "aio/backends.h"

namespace ballast::aio {
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
