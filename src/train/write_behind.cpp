#include "src/train/write_behind.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "ballast/core/error.h"

namespace ballast::train {
namespace {

constexpr Bytes kBuffer = 8 * kMiB;

}  // namespace

WriteBehind::WriteBehind(std::filesystem::path path, Bytes size)
    : file_(std::move(path)), ring_(kBuffer, "weights to write") {
  file_.reserve(size);
  file_.bypass_page_cache();
  for (std::size_t i = 0; i < BufferRing::kThreads; ++i) {
    threads_.emplace_back([this] { run(); });
  }
}

WriteBehind::~WriteBehind() {
  end();
}

void WriteBehind::pass_on() {
  if (buffer_) ring_.give({buffer_->number, buffer_->memory.first(used_)});
  buffer_.reset();
  used_ = 0;
}

void WriteBehind::write(ConstHostBytes bytes) {
  while (!bytes.empty()) {
    if (!buffer_) buffer_ = ring_.take();
    expects(buffer_.has_value(), "a file was written after its end");
    const Bytes count = std::min(bytes.size(), kBuffer - used_);
    std::memcpy(buffer_->memory.data() + used_, bytes.data(), count);
    used_ += count;
    bytes = bytes.subspan(count);
    if (used_ == kBuffer) pass_on();
  }
}

void WriteBehind::end() {
  ring_.close();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void WriteBehind::commit() {
  pass_on();
  end();
  ring_.check();
  file_.commit();
}

void WriteBehind::run() {
  try {
    while (const auto filled = ring_.next()) {
      file_.write_at(filled->number * kBuffer, filled->bytes);
      ring_.release(filled->number);
    }
  } catch (...) {
    ring_.close(std::current_exception());
  }
}

}  // namespace ballast::train
