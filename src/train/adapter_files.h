#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ballast/model/architecture.h"
#include "ballast/train/weight_files.h"

namespace ballast::train {

/// The tensors of a folder of PEFT (config/adapter_folder.h): those of adapters, and modules that
/// are trained in full.
class AdapterFiles {
 public:
  /// Throws like WeightFiles.
  explicit AdapterFiles(const std::filesystem::path& folder);

  /// Throws Error(data) naming the file and the tensor unless it holds exactly the trained tensors
  /// of `model`.
  void check(const model::Architecture& model) const;
  /// fp32 values of a trained tensor from element `first` on, in the order of memory. Throws
  /// Error(data), Error(io).
  void read(const model::TensorSpec& tensor, Elems first, std::span<float> out) const;
  [[nodiscard]] const WeightFiles& files() const { return files_; }

  /// The name in files of PEFT.
  [[nodiscard]] static std::string name_of(const model::TensorSpec& tensor);

 private:
  WeightFiles files_;
};

/// The weights of a model with those of a folder of PEFT merged into them: W + s B A, with DoRA
/// m / ||W + s B A|| times it, computed in fp32, and modules that are trained in full instead of
/// its own.
class MergedAdapters {
 public:
  using Place = WeightFiles::Place;

  /// `base`: the model; must outlive the object. Throws Error(data) naming the file and the tensor
  /// if the two do not fit, Error(config) like config::read_adapter_folder().
  MergedAdapters(const WeightFiles& base, const std::filesystem::path& folder);

  /// Whether the tensor of the model is changed.
  [[nodiscard]] bool changes(const Place& place) const { return changes_.contains(&place); }
  /// Changes fp32 `values`, those of a tensor of the model from element `first` on. With DoRA it
  /// first reads the whole tensor for its norms when `first` is 0. Takes the threads of the
  /// machine.
  void apply(const Place& place, Elems first, std::span<float> values);

 private:
  /// Adds scale * left [rows, rank] * right [rank, columns]; without factors: `replacement`.
  struct Change {
    std::vector<float> left;
    std::vector<float> right;
    const Place* replacement = nullptr;
    const Place* magnitudes = nullptr;  ///< of DoRA: [rows], or [columns] of a transposed map
    bool of_columns = false;
    std::vector<float> gains = {};  ///< likewise
  };
  void add_product(const Place& weight, const std::string& module);
  void add(const Place& place, const Change& change, Elems first, std::span<float> values) const;
  void compute_gains(const Place& place, Change& change) const;

  const WeightFiles& base_;
  AdapterFiles adapters_;
  std::size_t rank_ = 0;
  float scale_ = 1.0F;
  bool input_first_ = false;  ///< fan_in_fan_out
  bool dora_ = false;
  std::map<const Place*, Change> changes_;
};

/// The folder of the model that adapters at `folder` belong to. Throws Error(data) if it names
/// none that exists.
std::filesystem::path base_of_adapters(const std::filesystem::path& folder);

/// Whether `folder` is one of PEFT.
bool is_adapter_folder(const std::filesystem::path& folder);

}  // namespace ballast::train
