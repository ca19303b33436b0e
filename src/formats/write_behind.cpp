#include "src/formats/write_behind.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/units.h"

namespace ballast::formats {
namespace {

constexpr Bytes kBuffer = 4 * kMiB;
constexpr std::size_t kBuffers = 16;
static_assert(kBuffers * kBuffer == kWriteBuffers);
/// Shorter pieces go through the page cache.
constexpr Bytes kLeastDirect = 256 * kKiB;

aio::File open_for_writing(text::ReplacedFile& file, Bytes size) {
  file.reserve(size);
  return aio::File::open_for_pages(file.temporary(), true);
}

}  // namespace

WriteBuffers::WriteBuffers()
    : memory_(kBuffers * kBuffer, "weights to write"), queue_(aio::make_queue({})) {
  for (std::size_t i = 0; i < kBuffers; ++i) {
    buffers_.push_back({memory_.bytes().subspan(i * kBuffer, kBuffer), nullptr, std::nullopt});
  }
}

void WriteBuffers::write(WriteBehind& file, Bytes at, ConstHostBytes bytes) {
  if (file_ != &file || at != start_ + end_) {
    flush();
    file_ = &file;
    start_ = at / kPage * kPage;
    first_ = end_ = at - start_;
  }
  while (!bytes.empty()) {
    Buffer& buffer = buffers_[current_];
    finish(buffer);
    const Bytes count = std::min(bytes.size(), kBuffer - end_);
    std::memcpy(buffer.memory.data() + end_, bytes.data(), count);
    end_ += count;
    bytes = bytes.subspan(count);
    if (end_ == kBuffer) flush();
  }
}

/// Requests consist of whole pages. The rest of the first and of the last page has no request.
void WriteBuffers::flush() {
  const Bytes size = end_ - first_;
  if (size == 0) return;
  Buffer& buffer = buffers_[current_];
  const bool direct = size >= kLeastDirect;
  const Bytes pages = direct ? round_up(first_, kPage) : end_;
  const Bytes rest = direct ? end_ / kPage * kPage : end_;
  file_->file_.write_at(start_ + first_, buffer.memory.subspan(first_, pages - first_));
  file_->file_.write_at(start_ + rest, buffer.memory.subspan(rest, end_ - rest));
  if (direct) {
    buffer.file = file_;
    buffer.ticket = queue_->submit({.direction = aio::Direction::write,
                                    .file = &file_->direct_,
                                    .offset = start_ + pages,
                                    .memory = buffer.memory.subspan(pages, rest - pages)});
    current_ = (current_ + 1) % kBuffers;
  }
  const Bytes next = start_ + end_;
  start_ = next / kPage * kPage;
  first_ = end_ = next - start_;
}

void WriteBuffers::finish(Buffer& buffer) {
  if (!buffer.ticket) return;
  const aio::Completion completion = queue_->wait(*std::exchange(buffer.ticket, std::nullopt));
  if (completion.ok()) return;
  const std::string what = fmt::format("cannot write {}", buffer.file->path_.string());
  if (completion.error_number == 0) throw Error(ErrorCategory::io, what);
  throw Error(ErrorCategory::io, what, completion.error_number);
}

void WriteBuffers::finish(const WriteBehind& file) {
  if (file_ == &file) flush();
  for (Buffer& buffer : buffers_) {
    if (buffer.file == &file) finish(buffer);
  }
}

/// Ends the requests, since their file will be removed.
void WriteBuffers::abandon(const WriteBehind& file) {
  if (file_ == &file) {
    file_ = nullptr;
    first_ = end_ = 0;
  }
  for (Buffer& buffer : buffers_) {
    if (buffer.file != &file || !buffer.ticket) continue;
    queue_->cancel();
    static_cast<void>(queue_->wait(*std::exchange(buffer.ticket, std::nullopt)));
  }
}

WriteBehind::WriteBehind(std::filesystem::path path, Bytes size,
                         std::shared_ptr<WriteBuffers> buffers)
    : path_(path),
      file_(std::move(path)),
      direct_(open_for_writing(file_, size)),
      buffers_(std::move(buffers)) {}

WriteBehind::~WriteBehind() {
  buffers_->abandon(*this);
}

void WriteBehind::write(Bytes at, ConstHostBytes bytes) {
  buffers_->write(*this, at, bytes);
}

void WriteBehind::commit() {
  buffers_->finish(*this);
  file_.commit();
}

}  // namespace ballast::formats
