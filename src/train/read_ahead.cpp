#include "src/train/read_ahead.h"

#include <cerrno>
#include <exception>
#include <utility>

#include <fmt/format.h>
#include <unistd.h>

#include "ballast/text/files.h"

namespace ballast::train {
namespace {

/// Bytes [offset, offset + room.size()) of a file; false if the file ends before `needed` of them
/// or direct I/O refuses. The caller then reads with a descriptor that has neither limit.
bool read_direct(const Descriptor& file, Bytes offset, HostBytes room, Bytes needed) {
  for (Bytes done = 0; done < needed;) {
    const auto count = ::pread(file.number(), room.data() + done, room.size() - done,
                               static_cast<off_t>(offset + done));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    done += static_cast<Bytes>(count);
  }
  return true;
}

}  // namespace

/// The file of the last piece, opened for direct reads.
class ReadAhead::DirectFile {
 public:
  /// Reads `piece` to somewhere in `room`.
  ConstHostBytes read(const StoredPiece& piece, HostBytes room) {
    const SafetensorsReader& file = *piece.place->file;
    if (opened_ != &file) direct_ = text::reopen_direct(file.descriptor());
    opened_ = &file;
    const Bytes begin = piece.place->tensor->offset + piece.first;
    const Bytes before = begin % kPage;
    const Bytes needed = before + piece.bytes;
    const HostBytes out = room.subspan(before, piece.bytes);
    if (!direct_.is_open() ||
        !read_direct(direct_, begin - before, room.first(round_up(needed, kPage)), needed)) {
      text::read_fully(file.descriptor(), file.path(), begin, out);
    }
    return out;
  }

 private:
  const SafetensorsReader* opened_ = nullptr;
  Descriptor direct_;
};

ReadAhead::ReadAhead(std::vector<StoredPiece> pieces)
    // A piece starts and ends within pages.
    : pieces_(std::move(pieces)), ring_(kPiece + 2 * kPage, "pieces of weights to copy") {
  for (std::size_t i = 0; i < BufferRing::kThreads; ++i) {
    threads_.emplace_back([this] { run(); });
  }
}

ReadAhead::~ReadAhead() {
  ring_.close();
  for (std::thread& thread : threads_) thread.join();
}

ConstHostBytes ReadAhead::next() {
  if (held_) ring_.release(held_->number);
  held_ = ring_.next();
  return held_->bytes;
}

void ReadAhead::run() {
  try {
    DirectFile file;
    while (const auto empty = ring_.take()) {
      if (empty->number >= pieces_.size()) return;
      ring_.give({empty->number, file.read(pieces_[empty->number], empty->memory)});
    }
  } catch (...) {
    ring_.close(std::current_exception());
  }
}

}  // namespace ballast::train
