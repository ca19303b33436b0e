#include "src/train/write_behind.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/error.h"

namespace ballast::train {
namespace {

constexpr Bytes kBuffer = 4 * kMiB;
constexpr std::size_t kBuffers = 16;

aio::File open_for_writing(text::ReplacedFile& file, Bytes size) {
  file.reserve(size);
  return aio::File::open_for_pages(file.temporary(), true);
}

}  // namespace

WriteBehind::WriteBehind(std::filesystem::path path, Bytes size)
    : path_(path),
      file_(std::move(path)),
      direct_(open_for_writing(file_, size)),
      memory_(kBuffers * kBuffer, "weights to write"),
      queue_(aio::make_queue({})) {
  for (std::size_t i = 0; i < kBuffers; ++i) {
    buffers_.push_back({memory_.bytes().subspan(i * kBuffer, kBuffer), std::nullopt});
  }
}

WriteBehind::~WriteBehind() {
  queue_->cancel();
}

void WriteBehind::write(ConstHostBytes bytes) {
  while (!bytes.empty()) {
    Buffer& buffer = buffers_[current_];
    finish(buffer);
    const Bytes count = std::min(bytes.size(), kBuffer - used_);
    std::memcpy(buffer.memory.data() + used_, bytes.data(), count);
    used_ += count;
    bytes = bytes.subspan(count);
    if (used_ == kBuffer) submit_current();
  }
}

void WriteBehind::submit_current() {
  Buffer& buffer = buffers_[current_];
  buffer.ticket = queue_->submit({.direction = aio::Direction::write,
                                  .file = &direct_,
                                  .offset = written_,
                                  .memory = buffer.memory});
  written_ += kBuffer;
  used_ = 0;
  current_ = (current_ + 1) % kBuffers;
}

void WriteBehind::finish(Buffer& buffer) {
  if (!buffer.ticket) return;
  const aio::Completion completion = queue_->wait(*std::exchange(buffer.ticket, std::nullopt));
  if (completion.ok()) return;
  const std::string what = fmt::format("cannot write {}", path_.string());
  if (completion.error_number == 0) throw Error(ErrorCategory::io, what);
  throw Error(ErrorCategory::io, what, completion.error_number);
}

void WriteBehind::commit() {
  for (Buffer& buffer : buffers_) finish(buffer);
  file_.write_at(written_, buffers_[current_].memory.first(used_));
  file_.commit();
}

}  // namespace ballast::train
