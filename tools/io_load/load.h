#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/aio/file.h"
#include "ballast/core/memory.h"
#include "ballast/core/units.h"

namespace ballast::tools {

/// Content of a measured file: each 8-byte word is an invertible hash of (file, offset, pass), so
/// that it does not compress and identifies the write. A pass counts the writes of a page.
class IoContent {
 public:
  static constexpr Bytes kLargestFile = Bytes{1} << 45;
  static constexpr unsigned kMaxFiles = 64;

  /// `file`: number of the file, below kMaxFiles. `size`: at most kLargestFile, in whole pages.
  IoContent(unsigned file, Bytes size);

  /// Fills whole pages with the next content of [offset, offset + block.size()). From now on this
  /// content is expected there.
  void fill_next(HostBytes block, Bytes offset);
  /// Fills with the expected content.
  void fill(HostBytes block, Bytes offset) const;
  /// Returns "" if the block has the expected content of `offset`, otherwise the difference:
  /// "offset=4096: ...".
  [[nodiscard]] std::string mistake(HostBytes block, Bytes offset) const;

  /// Memory for the pass counters of a file.
  static Bytes bytes_needed(Bytes size) { return size / kPage * sizeof(std::uint16_t); }

 private:
  [[nodiscard]] std::uint64_t tag(Bytes offset) const;
  [[nodiscard]] std::string explain(Bytes offset, std::uint64_t found) const;

  std::uint64_t file_;
  Bytes size_;
  std::vector<std::uint16_t> passes_;
};

/// The absolute folders to measure. Throws Error(usage) for duplicate or too many folders,
/// Error(io) for a path that is not a directory.
std::vector<std::filesystem::path> measured_paths(const std::vector<std::string>& given,
                                                  std::string_view task);

/// Returns "/data: ext4, 71.9 GiB free", followed by the reasons if it is unsuited for swapping.
std::string describe_path(const std::filesystem::path& path);

/// Like parse_bytes, with `option` in its error.
Bytes read_size(const std::string& text, std::string_view option);

/// `read` and `write` access the file in order. `mixed` reads a block and writes the buffer back to
/// the same place, as an optimizer step does. `copy` writes it to a new file, as an export does:
/// file systems take longer for the first write of a block.
enum class IoPattern { read, write, mixed, copy };

std::string_view to_string(IoPattern pattern);
/// Throws Error(usage) with a suggestion.
IoPattern parse_io_pattern(const std::string& name);

/// An anonymous file on a measured path, and its content.
class IoRegion {
 public:
  /// File number `index` in `directory`; `size` bytes, rounded up to whole MiB.
  IoRegion(const std::filesystem::path& directory, unsigned index, Bytes size,
           aio::File::Access access);
  /// A file that takes no space, for the null backend only, which moves no data.
  static IoRegion placeholder(Bytes size);

  [[nodiscard]] const aio::File& file() const { return file_; }
  [[nodiscard]] IoContent& content() { return content_; }

 private:
  explicit IoRegion(aio::File file);

  aio::File file_;
  IoContent content_;
};

/// Load on all regions at once, with a queue and a thread per region.
struct IoLoad {
  IoPattern pattern = IoPattern::read;
  Bytes block = 1 * kMiB;  ///< one request; whole pages
  unsigned depth = 32;     ///< requests outstanding per region
  std::string backend = "auto";
  bool sqpoll = false;
  bool iopoll = false;
  /// Time to measure, in repeated passes. If empty, each block of the region is processed once.
  std::optional<double> seconds;
  /// Compares blocks that are read, and writes new content. Without it, the CPU time is that of the
  /// I/O alone.
  bool check = false;

  /// Memory for the buffers of one region.
  [[nodiscard]] Bytes buffer_bytes() const { return block * depth; }
};

struct IoResult {
  std::string backend;
  double seconds = 0.0;      ///< until the last block of the last region
  double cpu_seconds = 0.0;  ///< CPU time of the process, including the kernel's
  Bytes bytes_read = 0;
  Bytes bytes_written = 0;
  std::uint64_t blocks = 0;
  std::uint64_t batches = 0;    ///< submissions to the backends
  double median_seconds = 0.0;  ///< median time of a request, from submit to completion
  double p99_seconds = 0.0;

  [[nodiscard]] Bytes bytes() const { return bytes_read + bytes_written; }
  [[nodiscard]] double gb_per_second() const;
  [[nodiscard]] double cpu_seconds_per_gb() const;
  [[nodiscard]] double blocks_per_batch() const;
};

/// Runs `load`. `task` names it in errors ("bench io"). Throws Error for a failed transfer, a wrong
/// block or an interrupt.
IoResult run_load(const IoLoad& load, std::span<IoRegion> regions, std::string_view task,
                  const std::atomic<bool>& interrupted);

/// Writes each region in full, untimed, so that reads find data and writes overwrite blocks.
void fill_regions(std::span<IoRegion> regions, const std::string& backend, std::string_view task,
                  const std::atomic<bool>& interrupted);

/// Reads and compares all regions. Throws Error(io).
void verify_regions(const IoLoad& load, std::span<IoRegion> regions, std::string_view task,
                    const std::atomic<bool>& interrupted);

class Command;

/// Reads options of `command` from an INI or TOML file without sections. The keys are the long
/// options, and a value may be a list. The command line overrides the file. A `path` is relative to
/// the file. Throws Error(usage) that names file and key.
void read_job_file(Command command, const std::filesystem::path& file);

}  // namespace ballast::tools
