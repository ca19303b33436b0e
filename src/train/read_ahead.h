#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "ballast/aio/queue.h"
#include "ballast/train/weight_files.h"

namespace ballast::train {

/// Reads stored weights ahead of its callers: for each thread, what follows in the tensor that it
/// reads, then the tensor after it. It bypasses the page cache where the file system allows it:
/// weights larger than memory would only displace what is of use there, and the copy out of the
/// cache costs more time than the disk. Takes 32 MiB of memory per thread.
class ReadAhead {
 public:
  /// `order`: tensors in the order in which they will probably be read; others may be read, too.
  /// `files` must outlive the object. Throws Error(io).
  ReadAhead(const WeightFiles& files, const std::vector<const WeightFiles::Place*>& order);
  ~ReadAhead();
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  /// Bytes [first, first + out.size()) of a tensor as they are stored. Throws Error(data) if the
  /// file is too short, Error(io).
  void read(const WeightFiles::Place& place, Bytes first, HostBytes out);

 private:
  /// The data of a tensor.
  struct Range {
    const SafetensorsReader* reader = nullptr;
    const aio::File* file = nullptr;
    Bytes begin = 0;
    Bytes end = 0;
    bool operator==(const Range&) const = default;
  };
  class Stream;
  [[nodiscard]] Range range_of(const WeightFiles::Place& place) const;
  Stream& stream();

  std::map<const SafetensorsReader*, aio::File> files_;
  std::map<const WeightFiles::Place*, Range> following_;  ///< of large tensors in their order
  std::unique_ptr<aio::Queue> queue_;
  std::mutex mutex_;
  std::map<std::thread::id, std::unique_ptr<Stream>> streams_;
};

}  // namespace ballast::train
