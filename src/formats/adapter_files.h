#pragma once

#include <filesystem>
#include <span>
#include <string>

#include "ballast/formats/weight_files.h"
#include "ballast/model/architecture.h"

namespace ballast::formats {

/// The tensors of a PEFT folder (config/adapter_folder.h): those of adapters, and modules that are
/// trained in full.
class AdapterFiles {
 public:
  /// Throws like WeightFiles.
  explicit AdapterFiles(const std::filesystem::path& folder);

  /// Throws Error(data) naming the file and the tensor unless it contains exactly the trained
  /// tensors of `model`.
  void check(const model::Architecture& model) const;
  /// fp32 values of a trained tensor from element `first` on, in the order of memory. Throws
  /// Error(data), Error(io).
  void read(const model::TensorSpec& tensor, Elems first, std::span<float> out) const;
  [[nodiscard]] const WeightFiles& files() const { return files_; }

  /// Name of the tensor in files of PEFT.
  [[nodiscard]] static std::string name_of(const model::TensorSpec& tensor);

 private:
  WeightFiles files_;
};

/// The file of the tensors in a PEFT folder. Throws Error(data) for a file of pickled tensors.
std::filesystem::path adapter_weights(const std::filesystem::path& folder);

/// The name of a subfolder of `folder` that is a PEFT folder, such as a checkpoint of a trainer or
/// one of several adapters. The last by name; empty if there is none.
std::string adapter_folder_below(const std::filesystem::path& folder);

/// Whether `folder` is a PEFT folder.
bool is_adapter_folder(const std::filesystem::path& folder);

}  // namespace ballast::formats
