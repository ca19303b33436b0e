#include "src/train/read_ahead.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <optional>

#include "ballast/core/error.h"
#include "ballast/core/mapping.h"
#include "ballast/text/files.h"

namespace ballast::train {
namespace {

constexpr Bytes kWindow = 4 * kMiB;
constexpr std::size_t kWindows = 8;
/// In flight after a jump; one more for each that was used.
constexpr std::size_t kFirstWindows = 2;
/// Smaller tensors do not interrupt the order of the others.
constexpr Bytes kSmall = 256 * kKiB;

aio::File open_for_reading(const SafetensorsReader& reader) {
  try {
    aio::File file = aio::File::open(reader.path(), false);
    if (kPage % file.alignment() == 0) return file;
  } catch (const Error&) {
    // The file system has no direct I/O.
  }
  return aio::File::open(reader.path(), false, aio::File::Access::buffered);
}

}  // namespace

/// The windows of a file that one thread reads.
class ReadAhead::Stream {
 public:
  explicit Stream(aio::Queue& queue)
      : queue_(queue), memory_(kWindows * kWindow, "weights that are read ahead") {}
  ~Stream() { restart(0); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  /// Bytes [begin, begin + out.size()); the caller may go on until `end`.
  void read(const aio::File& file, const SafetensorsReader& reader, Bytes begin, Bytes end,
            HostBytes out) {
    while (!out.empty()) {
      const Bytes start = open_.empty() ? next_ : open_.front().begin;
      if (file_ != &file || begin < start || begin > next_) {
        file_ = &file;
        restart(begin / kPage * kPage);
      }
      while (!open_.empty() && open_.front().end <= begin) {
        drop_front();
        most_ = std::min(most_ + 1, kWindows);
      }
      while (open_.size() < most_ && next_ < end) submit(end);
      const HostBytes here = finish_front(reader).subspan(begin - open_.front().begin);
      const Bytes count = std::min(out.size(), here.size());
      std::memcpy(out.data(), here.data(), count);
      out = out.subspan(count);
      begin += count;
    }
  }

 private:
  struct Window {
    Bytes begin;
    Bytes end;
    HostBytes memory;
    std::optional<aio::Ticket> ticket;
    bool read = false;
  };

  /// Requests consist of whole pages; what remains of the file behind them has no request.
  void submit(Bytes end) {
    const Bytes pages = file_->size() / kPage * kPage;
    const Bytes stop =
        next_ < pages ? std::min({next_ + kWindow, round_up(end, kPage), pages}) : end;
    Window window = {.begin = next_,
                     .end = stop,
                     .memory = memory_.bytes().subspan(slot_ * kWindow, stop - next_),
                     .ticket = std::nullopt};
    if (next_ < pages) {
      window.ticket = queue_.submit({.direction = aio::Direction::read,
                                     .file = file_,
                                     .offset = window.begin,
                                     .memory = window.memory,
                                     .ahead = true});
    }
    open_.push_back(window);
    slot_ = (slot_ + 1) % kWindows;
    next_ = stop;
  }

  HostBytes finish_front(const SafetensorsReader& reader) {
    Window& window = open_.front();
    if (!window.read) {
      const bool here = window.ticket && queue_.wait(*window.ticket).ok();
      window.ticket.reset();
      // Says what is wrong, too.
      if (!here) {
        text::read_fully(reader.descriptor(), reader.path(), window.begin, window.memory);
      }
      window.read = true;
    }
    return window.memory;
  }

  void drop_front() {
    if (open_.front().ticket) static_cast<void>(queue_.wait(*open_.front().ticket));
    open_.pop_front();
  }

  void restart(Bytes at) {
    while (!open_.empty()) drop_front();
    next_ = at;
    most_ = kFirstWindows;
  }

  aio::Queue& queue_;
  Mapping memory_;
  const aio::File* file_ = nullptr;
  std::deque<Window> open_;  ///< being read or read; consecutive
  std::size_t slot_ = 0;     ///< of the next window
  Bytes next_ = 0;           ///< where it begins
  std::size_t most_ = kFirstWindows;
};

ReadAhead::ReadAhead(const WeightFiles& files, Extent extent)
    : extent_(extent), queue_(aio::make_queue({})) {
  for (const SafetensorsReader& reader : files.files()) {
    files_.emplace(&reader, open_for_reading(reader));
  }
}

ReadAhead::~ReadAhead() = default;

void ReadAhead::read(const WeightFiles::Place& place, Bytes first, HostBytes out) {
  const StoredTensor& tensor = *place.tensor;
  const Bytes begin = tensor.offset + first;
  if (tensor.bytes < kSmall) {
    return text::read_fully(place.file->descriptor(), place.file->path(), begin, out);
  }
  const aio::File& file = files_.at(place.file);
  const Bytes end = extent_ == Extent::file ? file.size() : tensor.offset + tensor.bytes;
  stream().read(file, *place.file, begin, end, out);
}

ReadAhead::Stream& ReadAhead::stream() {
  const std::lock_guard lock(mutex_);
  auto& found = streams_[std::this_thread::get_id()];
  if (!found) found = std::make_unique<Stream>(*queue_);
  return *found;
}

}  // namespace ballast::train
