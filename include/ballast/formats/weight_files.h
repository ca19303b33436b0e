#pragma once

#include <cstddef>
#include <deque>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"
#include "ballast/formats/safetensors.h"

namespace ballast::formats {

inline constexpr const char* kSingleWeights = "model.safetensors";
inline constexpr const char* kWeightsIndex = "model.safetensors.index.json";

/// The safetensors files that hold the weights of one model, in one file or sharded. Const members
/// may be called from several threads at a time.
class WeightFiles {
 public:
  struct Coded;
  struct Place {
    const StoredTensor* tensor = nullptr;
    const SafetensorsReader* file = nullptr;
    /// What a tensor is decoded from, if the files have codes of it. `tensor` is then the result,
    /// in a type of weights, and nowhere in the file.
    const Coded* coded = nullptr;
  };
  /// Tensors of the files that become one.
  struct Coded {
    enum class Format {
      mxfp4,  ///< a stack of matrices (src/formats/mxfp4.h)
      nf4,    ///< a matrix (src/formats/bitsandbytes.h)
      int8    ///< a matrix (the same)
    };
    Format format = Format::mxfp4;
    Place codes;
    Place scales;
    Place nested;       ///< of nf4: the scales of scales that are codes, else no tensor
    float mean = 0.0F;  ///< what is to be added to these
  };

  /// `path`: a safetensors file, the index of a sharded model (*.index.json), or a folder with
  /// model.safetensors, model.safetensors.index.json or the adapter_model.safetensors of PEFT.
  /// Reads and checks all headers and descriptions of codes, no other data. Throws Error(data)
  /// naming the file and, where it concerns one, the tensor: like SafetensorsReader; an index that
  /// is not one, that names files outside its folder, or that disagrees with the files; codes
  /// (Coded) whose scales or description are missing or do not fit, or of a format that is not
  /// known. Error(io) if reading fails.
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
  void check_shards(const std::map<std::string, std::size_t>& shards) const;
  void add_places();
  void pair_codes();

  std::filesystem::path path_;
  std::vector<SafetensorsReader> files_;
  std::vector<Place> places_;
  std::deque<StoredTensor> decoded_;                    ///< what codes become
  std::deque<Coded> coded_;                             ///< what these are decoded from
  std::unordered_map<std::string, std::size_t> found_;  ///< index in places_ by name
};

/// Bytes [first, first + out.size()) of a tensor as they are stored, through the page cache. Throws
/// Error(data) if the file is too short, Error(io).
void read_stored(const WeightFiles::Place& place, Bytes first, std::span<std::byte> out);

/// Whether two tensors have the same shape and values, also in different dtypes. Reads both in
/// pieces; throws like WeightFiles::read().
bool have_equal_values(const WeightFiles& files, const StoredTensor& one,
                       const StoredTensor& other);

/// Throws Error(data) naming file and tensor if the dtype is not one of weights.
DType type_of(const WeightFiles::Place& place);

}  // namespace ballast::formats
