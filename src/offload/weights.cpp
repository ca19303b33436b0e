#include "src/offload/weights.h"

#include <utility>

#include "ballast/core/error.h"
#include "ballast/formats/weight_files.h"
#include "ballast/state/checksum.h"

namespace ballast::offload {
namespace {

std::future<void> finish_on_a_thread(std::shared_ptr<state::SwapSpace> space,
                                     std::unique_ptr<state::SwapTransfer> transfer) {
  // The transfer is destroyed before the space.
  return std::async(std::launch::async,
                    [space = std::move(space), transfer = std::move(transfer)]() mutable {
                      transfer->finish();
                      transfer.reset();
                    });
}

}  // namespace

WeightHomes::WeightHomes(state::SwapOptions options, std::span<const Bytes> extents)
    : space_(std::make_shared<state::SwapSpace>(state::plan_swap(std::move(options), extents),
                                                std::span<const HostBytes>())),
      versions_(extents.size()) {}

Bytes WeightHomes::extent_bytes(std::size_t extent) const {
  expects(extent < versions_.size(), "weights on NVMe: no such extent");
  return space_->stripe().extent_bytes(extent);
}

std::future<void> WeightHomes::write(std::size_t extent, HostBytes memory) {
  return finish_on_a_thread(space_, space_->write(extent, memory, ++versions_.at(extent)));
}

std::future<void> WeightHomes::read(std::size_t extent, HostBytes memory, bool ahead) {
  return finish_on_a_thread(space_, space_->read(extent, memory, versions_.at(extent), ahead));
}

std::vector<StoredWeights> stored_weights(const std::filesystem::path& path) {
  const formats::WeightFiles files(path);
  std::vector<StoredWeights> all;
  for (const formats::SafetensorsReader& file : files.files()) {
    for (const formats::StoredTensor& tensor : file.tensors()) all.push_back({file.path(), tensor});
  }
  return all;
}

WeightsFile::WeightsFile(const std::filesystem::path& path,
                         std::span<const formats::StoredTensor> tensors,
                         const std::map<std::string, std::string>& metadata) {
  std::vector<formats::TensorToStore> all;
  for (const formats::StoredTensor& tensor : tensors) {
    all.push_back({.name = tensor.name,
                   .shape = tensor.shape,
                   .copied_dtype = tensor.dtype,
                   .copied_bytes = tensor.bytes});
  }
  writer_ = std::make_unique<formats::SafetensorsWriter>(path, all, metadata);
}

std::uint64_t checksum_of(ConstHostBytes bytes) {
  return state::checksum(bytes);
}

}  // namespace ballast::offload
