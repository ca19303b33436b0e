#pragma once

#include <cstddef>
#include <deque>
#include <filesystem>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"
#include "ballast/train/safetensors.h"

namespace ballast::train {

inline constexpr const char* kSingleWeights = "model.safetensors";
inline constexpr const char* kWeightsIndex = "model.safetensors.index.json";

/// The safetensors files that hold the weights of one model, in one file or sharded. Const members
/// may be called from several threads at a time.
class WeightFiles {
 public:
  struct Place {
    const StoredTensor* tensor = nullptr;
    const SafetensorsReader* file = nullptr;
    /// Of a stack of matrices in MXFP4 (src/train/mxfp4.h) the tensors that it is decoded from;
    /// `tensor` is then the result, in BF16, and nowhere in the file.
    const Place* codes = nullptr;
    const Place* scales = nullptr;
  };

  /// `path`: a safetensors file, the index of a sharded model (*.index.json), or a folder with
  /// model.safetensors, model.safetensors.index.json or the adapter_model.safetensors of PEFT.
  /// Reads and checks all headers, no data. Throws Error(data) naming the file and, where it
  /// concerns one, the tensor: like SafetensorsReader; an index that is not one, that names files
  /// outside its folder, or that disagrees with the files; codes of MXFP4 whose scales are missing
  /// or have another shape. Error(io) if reading fails.
  explicit WeightFiles(const std::filesystem::path& path);

  /// The single file or the index.
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  [[nodiscard]] const std::vector<SafetensorsReader>& files() const { return files_; }
  /// File by file, in the order of their data. Valid as long as this object.
  [[nodiscard]] const std::vector<Place>& tensors() const { return places_; }
  /// The tensor of that name or, as in files of a model without its head, of that name without its
  /// first part ("wte.weight" for "transformer.wte.weight"). nullptr if there is none.
  [[nodiscard]] const Place* find(const std::string& name) const;
  /// Sum over all tensors.
  [[nodiscard]] Bytes bytes() const;

  /// Like SafetensorsReader::read; not for values of a tensor in MXFP4.
  void read(const std::string& name, std::span<float> out, Elems first = 0) const;

 private:
  void open_index();
  void add_places();
  void pair_codes();

  std::filesystem::path path_;
  std::vector<SafetensorsReader> files_;
  std::vector<Place> places_;
  std::deque<StoredTensor> decoded_;                    ///< what codes become
  std::deque<Place> parts_;                             ///< the codes and scales
  std::unordered_map<std::string, std::size_t> found_;  ///< index in places_ by name
};

/// Bytes [first, first + out.size()) of a tensor as they are stored, through the page cache. Throws
/// Error(data) if the file is too short, Error(io).
void read_stored(const WeightFiles::Place& place, Bytes first, std::span<std::byte> out);

/// Throws Error(data) naming file and tensor if the dtype is not one of weights.
DType type_of(const WeightFiles::Place& place);

}  // namespace ballast::train
