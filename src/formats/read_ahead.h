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
#include "ballast/core/memory.h"
#include "ballast/formats/stored_weights.h"

namespace ballast::formats {

/// Reads stored weights ahead of its callers: the rest of the tensor that they read, then the next
/// tensor. Several threads share one read-ahead, so they should read neighbouring parts. It
/// bypasses the page cache if the file system allows it: weights larger than memory would only
/// displace useful data there, and the copy out of the cache takes longer than the disk. Takes 48
/// MiB of memory.
class ReadAhead {
 public:
  /// A tensor, or bytes of one that are read before those of another.
  struct Source {
    const WeightPlace* place = nullptr;
    Bytes begin = 0;
    Bytes end = 0;  ///< at most the tensor's size
  };

  /// `order`: the expected reads in order, with repetitions. Other tensors may be read, too.
  /// `files` must outlive the object. Throws Error(io).
  ReadAhead(std::span<const SafetensorsReader> files, const std::vector<Source>& order);
  ~ReadAhead();
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  /// Reads the stored bytes [first, first + out.size()) of a tensor. Throws Error(data) if the file
  /// is too short, Error(io).
  void read(const WeightPlace& place, Bytes first, HostBytes out);

  /// Bytes that were read ahead, including those that were not used.
  [[nodiscard]] Bytes bytes_read() const { return queue_->counters().bytes_read; }

 private:
  struct Window;
  struct Part {
    const WeightPlace* place;
    Bytes begin;  ///< position in the file
    Bytes end;
  };
  class Hold;

  // Functions that are called with the lock held.
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
  std::vector<HostBytes> free_;  ///< memory of closed windows
  std::list<Window> open_;       ///< windows being read or read, in the order of their submission
  std::deque<Part> dropped_;     ///< the last windows that were closed before all was taken
  std::optional<Part> source_;   ///< source of the next window; empty: none
  std::size_t number_ = 0;       ///< number of the source in the order, or its size
  Bytes next_ = 0;               ///< first byte of that window
  std::size_t most_;             ///< maximum number of open windows
};

/// Calls ReadAhead::read(), or, if `ahead` is null, read_stored() through the page cache.
void read_stored(const WeightPlace& place, Bytes first, HostBytes out, ReadAhead* ahead);

}  // namespace ballast::formats
