#include "ballast/engine/background_save.h"

#include <algorithm>
#include <utility>

#include "ballast/core/error.h"

namespace ballast::engine {

BackgroundSave::BackgroundSave(std::vector<Part> parts, std::function<void()> end)
    : parts_(std::move(parts)), end_(std::move(end)), thread_([this] { run(); }) {}

BackgroundSave::~BackgroundSave() {
  cancel();
}

/// Returns whether the next part must be saved.
bool BackgroundSave::next() {
  const std::lock_guard lock(mutex_);
  return !cancelled_ && saved_ < parts_.size();
}

void BackgroundSave::run() {
  std::exception_ptr error;
  try {
    while (next()) {
      parts_[saved_].save();
      {
        const std::lock_guard lock(mutex_);
        ++saved_;
      }
      changed_.notify_all();
    }
    if (saved_ < parts_.size()) {
      throw Error(ErrorCategory::state, "engine: it ended before its states were saved");
    }
    end_();
  } catch (...) {
    error = std::current_exception();
  }
  {
    const std::lock_guard lock(mutex_);
    error_ = error;
    saved_ = parts_.size();
    done_ = true;
  }
  changed_.notify_all();
}

void BackgroundSave::before_write(plan::BufferId buffer) {
  std::unique_lock lock(mutex_);
  if (saved_ == parts_.size()) return;  // the usual case
  const auto part = std::find_if(parts_.begin(), parts_.end(),
                                 [buffer](const Part& one) { return one.buffer == buffer; });
  if (part == parts_.end()) return;
  const auto index = static_cast<std::size_t>(part - parts_.begin());
  changed_.wait(lock, [&] { return saved_ > index || saved_ == parts_.size(); });
}

bool BackgroundSave::done() const {
  const std::lock_guard lock(mutex_);
  return done_;
}

void BackgroundSave::finish() {
  if (thread_.joinable()) thread_.join();
  if (error_) std::rethrow_exception(error_);
}

void BackgroundSave::cancel() {
  {
    const std::lock_guard lock(mutex_);
    cancelled_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

}  // namespace ballast::engine
