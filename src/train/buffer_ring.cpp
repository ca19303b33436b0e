#include "src/train/buffer_ring.h"

#include <utility>

namespace ballast::train {

BufferRing::BufferRing(Bytes each, std::string_view what)
    : each_(round_up(each, kPage)), memory_(each_ * kBuffers, what) {}

std::optional<BufferRing::Empty> BufferRing::take() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return closed_ || taken_ - freed_ < kBuffers; });
  if (error_ != nullptr) std::rethrow_exception(error_);
  if (closed_) return std::nullopt;
  const std::uint64_t number = taken_++;
  state(number) = State::taken;
  return Empty{number, memory_.bytes().subspan(number % kBuffers * each_, each_)};
}

void BufferRing::give(const Filled& filled) {
  const std::lock_guard lock(mutex_);
  state(filled.number) = State::filled;
  filled_[filled.number % kBuffers] = filled.bytes;
  changed_.notify_all();
}

std::optional<BufferRing::Filled> BufferRing::next() {
  std::unique_lock lock(mutex_);
  const std::uint64_t number = asked_++;
  // Its place may still hold an earlier number.
  const auto is_here = [&] { return number < taken_ && state(number) == State::filled; };
  changed_.wait(lock, [&] { return closed_ || is_here(); });
  if (error_ != nullptr) std::rethrow_exception(error_);
  if (!is_here()) return std::nullopt;
  return Filled{number, filled_[number % kBuffers]};
}

void BufferRing::release(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  state(number) = State::released;
  while (freed_ < taken_ && state(freed_) == State::released) state(freed_++) = State::empty;
  changed_.notify_all();
}

void BufferRing::close(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  if (!error_) error_ = std::move(error);
  changed_.notify_all();
}

void BufferRing::check() {
  const std::lock_guard lock(mutex_);
  if (error_ != nullptr) std::rethrow_exception(error_);
}

}  // namespace ballast::train
