#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "ballast/aio/queue.h"
#include "ballast/train/weight_files.h"

namespace ballast::train {

/// Reads stored weights ahead of its callers, on for each thread from where it has read. It
/// bypasses the page cache where the file system allows it: weights larger than memory would only
/// displace what is of use there, and the copy out of the cache costs more time than the disk.
/// Takes 32 MiB of memory per thread.
class ReadAhead {
 public:
  /// How far a thread will probably go on.
  enum class Extent { tensor, file };

  /// `files` must outlive the object. Throws Error(io).
  ReadAhead(const WeightFiles& files, Extent extent);
  ~ReadAhead();
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  /// Bytes [first, first + out.size()) of a tensor as they are stored. Throws Error(data) if the
  /// file is too short, Error(io).
  void read(const WeightFiles::Place& place, Bytes first, HostBytes out);

 private:
  class Stream;
  Stream& stream();

  Extent extent_;
  std::map<const SafetensorsReader*, aio::File> files_;
  std::unique_ptr<aio::Queue> queue_;
  std::mutex mutex_;
  std::map<std::thread::id, std::unique_ptr<Stream>> streams_;
};

}  // namespace ballast::train
