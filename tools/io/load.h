#pragma once

#include <atomic>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/aio/file.h"
#include "ballast/core/units.h"

#include "tools/io/content.h"

namespace ballast::tools {

/// `read` and `write` go through the file in order. `mixed` is what an optimizer step does: a block
/// is read and, when it is there, the same buffer is written back to the same place.
enum class IoPattern { read, write, mixed };

std::string_view to_string(IoPattern pattern);
/// Throws Error(usage) with a suggestion.
IoPattern parse_io_pattern(const std::string& name);

/// A nameless file on a path that is measured, and what it holds.
class IoRegion {
 public:
  /// File number `index` of `size` bytes, up to whole MiB, in `directory`. Throws what File and
  /// IoContent throw.
  IoRegion(const std::filesystem::path& directory, unsigned index, Bytes size,
           aio::File::Access access);
  /// Stands in for a file: has its size and takes no space. For the null backend only, which moves
  /// nothing.
  static IoRegion placeholder(Bytes size);

  [[nodiscard]] const aio::File& file() const { return file_; }
  [[nodiscard]] IoContent& content() { return content_; }

 private:
  explicit IoRegion(aio::File file);

  aio::File file_;
  IoContent content_;
};

/// What is done to every region at once: one queue and one thread each.
struct IoLoad {
  IoPattern pattern = IoPattern::read;
  Bytes block = 1 * kMiB;  ///< one request; whole pages
  unsigned depth = 32;     ///< requests outstanding per region
  std::string backend = "auto";
  bool sqpoll = false;
  bool iopoll = false;
  /// Time to measure, round and round; nothing: each block of the region once.
  std::optional<double> seconds;
  /// Blocks are compared with what they should be when they are read, and are new ones when they
  /// are written. Without it the buffers' bytes are nobody's business and CPU time is the I/O's.
  bool check = false;

  /// Memory for the buffers of one region.
  [[nodiscard]] Bytes buffer_bytes() const { return block * depth; }
};

struct IoResult {
  std::string backend;       ///< that was used
  double seconds = 0.0;      ///< until the last block of the last region
  double cpu_seconds = 0.0;  ///< of the process, kernel's part included, meanwhile
  Bytes bytes_read = 0;
  Bytes bytes_written = 0;
  std::uint64_t blocks = 0;
  std::uint64_t batches = 0;    ///< times that blocks were handed to the backends
  double median_seconds = 0.0;  ///< of a request, from submit to its end
  double p99_seconds = 0.0;

  [[nodiscard]] Bytes bytes() const { return bytes_read + bytes_written; }
  [[nodiscard]] double gb_per_second() const;
  [[nodiscard]] double cpu_seconds_per_gb() const;
  [[nodiscard]] double blocks_per_batch() const;
};

/// Carries out `load`. `task` names it in errors ("bench io"). Throws Error: a transfer that
/// failed, a block that is not what it should be, an interrupt.
IoResult run_load(const IoLoad& load, std::span<IoRegion> regions, std::string_view task,
                  const std::atomic<bool>& interrupted);

/// Writes each region in full, untimed, so that reads find data and writes overwrite blocks.
void fill_regions(std::span<IoRegion> regions, const std::string& backend, std::string_view task,
                  const std::atomic<bool>& interrupted);

/// Reads all of it and compares. Throws Error(io).
void verify_regions(const IoLoad& load, std::span<IoRegion> regions, std::string_view task,
                    const std::atomic<bool>& interrupted);

}  // namespace ballast::tools
