#pragma once

#include <cstddef>
#include <deque>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "ballast/core/units.h"
#include "ballast/formats/safetensors.h"
#include "ballast/formats/safetensors_header.h"
#include "ballast/formats/stored_weights.h"

namespace ballast::formats {

/// The matrices of separate experts in a tensor that stacks those of all experts of a layer, under
/// the names that they have in folders with a tensor per expert. PREFIX.experts.gate_up_proj
/// [E, 2 I, H] has PREFIX.experts.NUMBER.gate_proj.weight [I, H] and then up_proj.weight, for one
/// expert after the other; PREFIX.experts.down_proj [E, H, I] has down_proj.weight [H, I]. Empty
/// for every other tensor. Offsets are those in the file. Source: the classes of transformers 5,
/// whose mapping "qwen2_moe" stacks such matrices when it loads a model.
std::vector<StoredTensor> matrices_of_experts(const StoredTensor& tensor);

/// The safetensors files with the weights of one model, in one file or sharded. Const members may
/// be called from several threads at a time.
class WeightFiles {
 public:
  /// `path`: a safetensors file, the index of a sharded model (*.index.json), or a folder with
  /// model.safetensors, model.safetensors.index.json or the adapter_model.safetensors of PEFT.
  /// Reads and checks all headers and descriptions of codes, no other data. Throws Error(data)
  /// naming the file and, where it concerns one, the tensor: like SafetensorsReader; an index that
  /// is not one, that names files outside its folder, or that disagrees with the files; codes
  /// (QuantizedWeights) whose scales or description are missing or do not fit, or of a format that
  /// is not known. Error(io) if reading fails.
  explicit WeightFiles(const std::filesystem::path& path);

  /// The single file or the index.
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  [[nodiscard]] const std::vector<SafetensorsReader>& files() const { return files_; }
  /// The tensors file by file, in the order of their data. Valid as long as this object.
  [[nodiscard]] const std::vector<WeightPlace>& tensors() const { return places_; }
  /// The tensor called `name` or, for files of a model without its head, called `name` without its
  /// first part ("wte.weight" for "transformer.wte.weight"). In a model of text and images, also
  /// the tensor of the text model with this name (config::name_in_text_model()). Also a matrix of
  /// an expert that is stored in a stack of all experts (WeightPlace::stack). nullptr if there is
  /// none.
  [[nodiscard]] const WeightPlace* find(const std::string& name) const;
  /// Size of all tensors.
  [[nodiscard]] Bytes bytes() const;

  /// Like SafetensorsReader::read; not for a tensor in MXFP4.
  void read(const std::string& name, std::span<float> out, Elems first = 0) const;

 private:
  void open_index();
  void check_shards(const std::map<std::string, std::size_t>& shards) const;
  void add_places();
  void pair_codes();
  void index_names();
  void index_stacks();

  std::filesystem::path path_;
  std::vector<SafetensorsReader> files_;
  std::vector<WeightPlace> places_;
  std::deque<StoredTensor> dequantized_;                ///< dequantised tensors
  std::deque<QuantizedWeights> quantized_;              ///< quantised forms of these
  std::unordered_map<std::string, std::size_t> found_;  ///< indices in places_ by name
  /// Indices in places_ by name_in_text_model(), of tensors with another name.
  std::unordered_map<std::string, std::size_t> in_text_model_;
  std::deque<StoredTensor> in_stacks_;  ///< matrices of experts in stacks
  /// Places of these by name_in_text_model().
  std::unordered_map<std::string, WeightPlace> stacked_;
};

/// Whether two tensors have the same shape and values, even in different dtypes. Reads both in
/// pieces; throws like WeightFiles::read().
bool have_equal_values(const WeightFiles& files, const StoredTensor& one,
                       const StoredTensor& other);

}  // namespace ballast::formats
