#include "src/formats/read_ahead.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "ballast/text/files.h"

namespace ballast::formats {
namespace {

constexpr Bytes kWindow = 2 * kMiB;
constexpr std::size_t kWindows = 24;
/// Number of windows in flight after a jump. It doubles after each window that was used.
constexpr std::size_t kFirstWindows = 2;

}  // namespace

/// Whole pages of a tensor, except at the end of the file.
struct ReadAhead::Window {
  Window(const Part& part, Bytes wanted, HostBytes place_of_data)
      : place(part.place), begin(part.begin), end(part.end), left(wanted), memory(place_of_data) {}

  [[nodiscard]] bool contains(const WeightPlace& other, Bytes at) const {
    return place == &other && begin <= at && at < end;
  }

  /// Returns when the data have arrived. Several threads may call it.
  void finish(aio::Queue& queue) {
    const std::lock_guard lock(finishing);
    if (read) return;
    const bool here = ticket && queue.wait(*ticket).ok();
    ticket.reset();
    // Also reports what is wrong.
    if (!here) text::read_fully(place->file->descriptor(), place->file->path(), begin, memory);
    read = true;
  }

  const WeightPlace* place;
  Bytes begin;  ///< position in the file
  Bytes end;
  Bytes left;  ///< bytes that were not taken yet
  HostBytes memory;
  std::optional<aio::Ticket> ticket = std::nullopt;
  std::size_t users = 0;
  bool read = false;
  std::mutex finishing = {};
};

/// Keeps a window open during its lifetime.
class ReadAhead::Hold {
 public:
  Hold(ReadAhead& reader, const WeightPlace& place, Bytes at) : reader_(reader) {
    std::unique_lock lock(reader_.mutex_);
    window_ = reader_.hold(lock, place, at);
  }
  ~Hold() {
    if (window_ == nullptr) return;
    const std::lock_guard lock(reader_.mutex_);
    reader_.release(*window_, taken_);
  }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

  [[nodiscard]] bool found() const { return window_ != nullptr; }
  /// Copies the available bytes from `at` on and returns their number.
  Bytes take(Bytes at, HostBytes out) {
    window_->finish(*reader_.queue_);
    const HostBytes here = window_->memory.subspan(at - window_->begin);
    taken_ = std::min(out.size(), here.size());
    std::memcpy(out.data(), here.data(), taken_);
    return taken_;
  }

 private:
  ReadAhead& reader_;
  Window* window_ = nullptr;
  Bytes taken_ = 0;
};

ReadAhead::ReadAhead(std::span<const SafetensorsReader> files, const std::vector<Source>& order)
    : queue_(aio::make_queue({})),
      memory_(kWindows * kWindow, "weights that are read ahead"),
      most_(kWindows) {
  for (const SafetensorsReader& reader : files) {
    files_.emplace(&reader, aio::File::open_for_pages(reader.path(), false));
  }
  for (std::size_t w = 0; w < kWindows; ++w) {
    free_.push_back(memory_.bytes().subspan(w * kWindow, kWindow));
  }
  for (const auto& [place, begin, end] : order) {
    if (place == nullptr || begin == end) continue;
    const Bytes offset = place->tensor->offset;
    order_.push_back({place, offset + begin, offset + end});
  }
  if (order_.empty()) return;
  source_ = order_.front();
  next_ = source_->begin;
  submit_ahead();
}

ReadAhead::~ReadAhead() {
  queue_->cancel();
  while (!open_.empty()) drop(open_.begin());
}

void ReadAhead::read(const WeightPlace& place, Bytes first, HostBytes out) {
  Bytes at = place.tensor->offset + first;
  while (!out.empty()) {
    Hold window(*this, place, at);
    if (!window.found()) return read_stored(place, at - place.tensor->offset, out);
    const Bytes taken = window.take(at, out);
    out = out.subspan(taken);
    at += taken;
  }
}

/// Null if the window was dropped a short while ago: other threads have continued from there, and
/// going back for the rest would only drop what they need.
ReadAhead::Window* ReadAhead::hold(std::unique_lock<std::mutex>& lock, const WeightPlace& place,
                                   Bytes at) {
  while (true) {
    for (Window& window : open_) {
      if (!window.contains(place, at)) continue;
      ++window.users;
      submit_ahead();
      return &window;
    }
    if (was_dropped(place, at)) return nullptr;
    if (!comes_next(place, at)) jump(place, at);
    if (!free_.empty() || drop_one()) {
      submit();
    } else {
      released_.wait(lock);
    }
  }
}

void ReadAhead::release(Window& window, Bytes taken) {
  --window.users;
  window.left -= std::min(window.left, taken);
  if (window.users == 0 && window.left == 0) {
    drop(std::find_if(open_.begin(), open_.end(),
                      [&window](const Window& open) { return &open == &window; }));
    most_ = std::min(2 * most_, kWindows);
    submit_ahead();
  }
  released_.notify_all();
}

bool ReadAhead::comes_next(const WeightPlace& place, Bytes at) const {
  return source_ && source_->place == &place && next_ <= at && at < source_->end &&
         at < next_ + kWindows * kWindow;
}

bool ReadAhead::was_dropped(const WeightPlace& place, Bytes at) const {
  return std::any_of(dropped_.begin(), dropped_.end(), [&](const Part& part) {
    return part.place == &place && part.begin <= at && at < part.end;
  });
}

/// Continues at another place, at its next turn in the order.
void ReadAhead::jump(const WeightPlace& place, Bytes at) {
  for (auto window = open_.begin(); window != open_.end();) {
    const auto one = window++;
    if (one->users == 0) {
      drop(one);
    } else {
      remember(*one);
      one->left = 0;
    }
  }
  most_ = kFirstWindows;
  const auto is_there = [&](const Part& part) {
    return part.place == &place && part.begin <= at && at < part.end;
  };
  const auto here = order_.begin() + static_cast<std::ptrdiff_t>(number_);
  auto turn = std::find_if(here, order_.end(), is_there);
  if (turn == order_.end()) turn = std::find_if(order_.begin(), order_.end(), is_there);
  number_ = static_cast<std::size_t>(turn - order_.begin());
  const Bytes offset = place.tensor->offset;
  source_ = turn != order_.end() ? *turn : Part{&place, offset, offset + place.tensor->bytes};
  next_ = at;
}

/// Requests consist of whole pages. The rest of the file after them has no request.
void ReadAhead::submit() {
  const aio::File& file = files_.at(source_->place->file);
  const Bytes pages = file.size() / kPage * kPage;
  const Bytes begin = next_ / kPage * kPage;
  const bool whole = begin < pages;
  const Bytes end = std::min(begin + kWindow,
                             whole ? std::min(round_up(source_->end, kPage), pages) : source_->end);
  Window& window =
      open_.emplace_back(Part{source_->place, begin, end}, std::min(end, source_->end) - next_,
                         free_.back().first(end - begin));
  free_.pop_back();
  if (whole) {
    window.ticket = queue_->submit({.direction = aio::Direction::read,
                                    .file = &file,
                                    .offset = begin,
                                    .memory = window.memory,
                                    .ahead = true});
  }
  next_ = end;
  if (next_ >= source_->end) go_on();
}

/// Continues with the next tensor of the order.
void ReadAhead::go_on() {
  source_.reset();
  if (number_ + 1 >= order_.size()) return;
  source_ = order_[++number_];
  next_ = source_->begin;
}

void ReadAhead::submit_ahead() {
  while (source_ && open_.size() < most_ && !free_.empty()) submit();
}

void ReadAhead::drop(std::list<Window>::iterator window) {
  if (window->ticket) static_cast<void>(queue_->wait(*window->ticket));
  if (window->left > 0) remember(*window);
  const auto slot = static_cast<Bytes>(window->memory.data() - memory_.bytes().data());
  free_.push_back(memory_.bytes().subspan(slot, kWindow));
  open_.erase(window);
}

bool ReadAhead::drop_one() {
  const auto unused = std::find_if(open_.begin(), open_.end(),
                                   [](const Window& window) { return window.users == 0; });
  if (unused == open_.end()) return false;
  drop(unused);
  return true;
}

void ReadAhead::remember(const Window& window) {
  dropped_.push_back({window.place, window.begin, window.end});
  if (dropped_.size() > kWindows) dropped_.pop_front();
}

void read_stored(const WeightPlace& place, Bytes first, HostBytes out, ReadAhead* ahead) {
  if (ahead != nullptr) return ahead->read(place, first, out);
  read_stored(place, first, out);
}

}  // namespace ballast::formats
