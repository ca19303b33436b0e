#pragma once

#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "ballast/aio/queue.h"
#include "ballast/core/mapping.h"
#include "ballast/formats/stored_weights.h"

namespace ballast::formats {

/// Reads stored weights ahead of its callers: what follows in the tensor that they read, then the
/// tensor after it. Several threads share one read-ahead, so they should read parts that lie close
/// together. It bypasses the page cache where the file system allows it: weights larger than memory
/// would only displace what is of use there, and the copy out of the cache costs more time than the
/// disk. Takes 48 MiB of memory.
class ReadAhead {
 public:
  /// A tensor, or the bytes of one that are read before those of another.
  struct Source {
    const WeightPlace* place = nullptr;
    Bytes begin = 0;
    Bytes end = 0;  ///< at most the size of the tensor
  };

  /// `order`: what will probably be read, from the first on; what will be read twice is there
  /// twice. Others may be read, too. `files` must outlive the object. Throws Error(io).
  ReadAhead(std::span<const SafetensorsReader> files, const std::vector<Source>& order);
  ~ReadAhead();
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  /// Bytes [first, first + out.size()) of a tensor as they are stored. Throws Error(data) if the
  /// file is too short, Error(io).
  void read(const WeightPlace& place, Bytes first, HostBytes out);

  /// Bytes that were read ahead, those included that nobody has asked for.
  [[nodiscard]] Bytes bytes_read() const { return queue_->counters().bytes_read; }

 private:
  struct Window;
  struct Part {
    const WeightPlace* place;
    Bytes begin;  ///< in the file
    Bytes end;
  };
  class Hold;

  // All of these are called with the lock held.
  Window* hold(std::unique_lock<std::mutex>& lock, const WeightPlace& place, Bytes at);
  void release(Window& window, Bytes taken);
  void jump(const WeightPlace& place, Bytes at);
  void submit();
  void submit_ahead();
  void go_on();
  void drop(std::list<Window>::iterator window);
  bool drop_one();
  void remember(const Window& window);
  [[nodiscard]] bool comes_next(const WeightPlace& place, Bytes at) const;
  [[nodiscard]] bool was_dropped(const WeightPlace& place, Bytes at) const;

  std::map<const SafetensorsReader*, aio::File> files_;
  std::vector<Part> order_;
  std::unique_ptr<aio::Queue> queue_;
  Mapping memory_;
  std::mutex mutex_;
  std::condition_variable released_;
  std::vector<HostBytes> free_;  ///< memory of windows that are not open
  std::list<Window> open_;       ///< being read or read, in the order of their submission
  std::deque<Part> dropped_;     ///< the last ones that had not been taken whole
  std::optional<Part> source_;   ///< where the next window will be; none: nowhere
  std::size_t number_ = 0;       ///< of the source in the order, or its size
  Bytes next_ = 0;               ///< first byte of that window
  std::size_t most_;             ///< open windows
};

/// ReadAhead::read(), or without one read_stored() through the page cache.
void read_stored(const WeightPlace& place, Bytes first, HostBytes out, ReadAhead* ahead);

}  // namespace ballast::formats
