#include "src/train/read_ahead.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <optional>

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

}  // namespace

/// The windows that one thread reads.
class ReadAhead::Stream {
 public:
  explicit Stream(aio::Queue& queue)
      : queue_(queue), memory_(kWindows * kWindow, "weights that are read ahead") {}
  ~Stream() {
    while (!open_.empty()) drop_front();
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  /// Bytes [begin, begin + out.size()) of the file, which are part of `tensor`. The caller will
  /// probably go on until its end, and then with `following`.
  void read(const Range& tensor, const Range& following, Bytes begin, HostBytes out) {
    while (!out.empty()) {
      while (!open_.empty() && !contains(open_.front(), tensor.file, begin)) drop_front();
      if (open_.empty() && !(source_.file == tensor.file && next_ == begin)) {
        continue_in(tensor, begin);
        most_ = kFirstWindows;
      }
      submit_ahead(tensor, following);
      const HostBytes here = finish_front().subspan(begin - open_.front().begin);
      const Bytes count = std::min(out.size(), here.size());
      std::memcpy(out.data(), here.data(), count);
      out = out.subspan(count);
      begin += count;
    }
  }

 private:
  struct Window {
    const SafetensorsReader* reader;
    const aio::File* file;
    Bytes begin;
    Bytes end;
    HostBytes memory;
    std::optional<aio::Ticket> ticket;
    bool read = false;
  };

  static bool contains(const Window& window, const aio::File* file, Bytes at) {
    return window.file == file && window.begin <= at && at < window.end;
  }

  void continue_in(const Range& range, Bytes at) {
    source_ = range;
    next_ = at / kPage * kPage;
  }

  void submit_ahead(const Range& tensor, const Range& following) {
    while (open_.size() < most_) {
      if (next_ >= source_.end) {
        if (!(source_ == tensor) || following.file == nullptr) return;
        continue_in(following, following.begin);
      }
      submit();
    }
  }

  /// Requests consist of whole pages; what remains of the file behind them has no request.
  void submit() {
    const Bytes pages = source_.file->size() / kPage * kPage;
    const bool whole = next_ < pages;
    const Bytes stop =
        whole ? std::min({next_ + kWindow, round_up(source_.end, kPage), pages}) : source_.end;
    Window window = {.reader = source_.reader,
                     .file = source_.file,
                     .begin = next_,
                     .end = stop,
                     .memory = memory_.bytes().subspan(slot_ * kWindow, stop - next_),
                     .ticket = std::nullopt};
    if (whole) {
      window.ticket = queue_.submit({.direction = aio::Direction::read,
                                     .file = window.file,
                                     .offset = window.begin,
                                     .memory = window.memory,
                                     .ahead = true});
    }
    open_.push_back(window);
    slot_ = (slot_ + 1) % kWindows;
    next_ = stop;
  }

  HostBytes finish_front() {
    Window& window = open_.front();
    if (!window.read) {
      const bool here = window.ticket && queue_.wait(*window.ticket).ok();
      window.ticket.reset();
      // Says what is wrong, too.
      if (!here) {
        text::read_fully(window.reader->descriptor(), window.reader->path(), window.begin,
                         window.memory);
      }
      window.read = true;
    }
    return window.memory;
  }

  void drop_front() {
    if (open_.front().ticket) static_cast<void>(queue_.wait(*open_.front().ticket));
    open_.pop_front();
    most_ = std::min(most_ + 1, kWindows);
  }

  aio::Queue& queue_;
  Mapping memory_;
  std::deque<Window> open_;  ///< being read or read
  std::size_t slot_ = 0;     ///< of the next window
  Range source_;             ///< where it will be
  Bytes next_ = 0;           ///< its first byte
  std::size_t most_ = kFirstWindows;
};

ReadAhead::ReadAhead(const WeightFiles& files, const std::vector<const WeightFiles::Place*>& order)
    : queue_(aio::make_queue({})) {
  for (const SafetensorsReader& reader : files.files()) {
    files_.emplace(&reader, aio::File::open_for_pages(reader.path(), false));
  }
  const WeightFiles::Place* before = nullptr;
  for (const WeightFiles::Place* const place : order) {
    if (place == nullptr || place->tensor->bytes < kSmall) continue;
    if (before != nullptr) following_.emplace(before, range_of(*place));
    before = place;
  }
}

ReadAhead::~ReadAhead() = default;

ReadAhead::Range ReadAhead::range_of(const WeightFiles::Place& place) const {
  const StoredTensor& tensor = *place.tensor;
  return {place.file, &files_.at(place.file), tensor.offset, tensor.offset + tensor.bytes};
}

void ReadAhead::read(const WeightFiles::Place& place, Bytes first, HostBytes out) {
  const StoredTensor& tensor = *place.tensor;
  const Bytes begin = tensor.offset + first;
  if (tensor.bytes < kSmall) {
    return text::read_fully(place.file->descriptor(), place.file->path(), begin, out);
  }
  const auto following = following_.find(&place);
  stream().read(range_of(place), following == following_.end() ? Range() : following->second, begin,
                out);
}

ReadAhead::Stream& ReadAhead::stream() {
  const std::lock_guard lock(mutex_);
  auto& found = streams_[std::this_thread::get_id()];
  if (!found) found = std::make_unique<Stream>(*queue_);
  return *found;
}

}  // namespace ballast::train
