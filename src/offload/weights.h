#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <future>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/memory.h"
#include "ballast/formats/safetensors.h"
#include "ballast/state/swap_plan.h"
#include "ballast/state/swap_space.h"

namespace ballast::offload {

/// The weights of another program's blocks on NVMe, an extent per block, with the checksums of
/// state::SwapSpace. Each transfer ends on a separate thread, so callers can ask whether it has
/// ended. Not thread-safe. Transfers of one extent must not overlap, except reads.
class WeightHomes {
 public:
  /// Allocates the space. Throws those of state::plan_swap() and state::SwapSpace.
  WeightHomes(state::SwapOptions options, std::span<const Bytes> extents);

  /// Starts to write or read a whole extent. `memory`: page-aligned, of the extent's size in whole
  /// pages, not used until the transfer has ended. The future's get() throws Error(io) and
  /// Error(state) like state::SwapTransfer::finish(), its destructor waits. `ahead`: see
  /// aio::Request.
  std::future<void> write(std::size_t extent, HostBytes memory);
  std::future<void> read(std::size_t extent, HostBytes memory, bool ahead);

  /// Bytes of an extent, in whole pages.
  [[nodiscard]] Bytes extent_bytes(std::size_t extent) const;
  [[nodiscard]] Bytes nvme_bytes() const { return space_->stripe().bytes(); }
  /// Returns "io_uring", "threads", or "io_uring and threads".
  [[nodiscard]] std::string_view io_backend() const { return space_->backend(); }

 private:
  std::shared_ptr<state::SwapSpace> space_;  ///< shared with running transfers
  std::vector<std::uint64_t> versions_;      ///< by extent; 0: never written
};

/// A tensor of a model's files.
struct StoredWeights {
  std::filesystem::path file;
  formats::StoredTensor tensor;
};

/// The tensors of a safetensors file, an index, or a folder, as they are stored. Throws Error(data)
/// and Error(io) like formats::WeightFiles.
std::vector<StoredWeights> stored_weights(const std::filesystem::path& path);

/// Writes a safetensors file of tensors of any type; see formats::SafetensorsWriter.
class WeightsFile {
 public:
  /// Uses the name, type, shape and bytes of each tensor.
  WeightsFile(const std::filesystem::path& path, std::span<const formats::StoredTensor> tensors,
              const std::map<std::string, std::string>& metadata);

  /// Writes a whole tensor.
  void write(const std::string& name, ConstHostBytes bytes) {
    writer_->write_bytes(name, bytes, 0);
  }
  /// Makes the file durable and gives it its name.
  void finish() { writer_->finish(); }

 private:
  std::unique_ptr<formats::SafetensorsWriter> writer_;
};

/// XXH3 of `bytes`.
std::uint64_t checksum_of(ConstHostBytes bytes);

}  // namespace ballast::offload
