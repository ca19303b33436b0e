#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "ballast/core/units.h"
#include "ballast/formats/weight_files.h"
#include "ballast/text/json.h"

namespace ballast::formats {

/// The files of a folder of weights and the stored form of their tensors: what an export needs to
/// write the same files again.
struct FolderLayout {
  /// Use of a stored tensor.
  enum class Role : std::uint8_t {
    weight,      ///< holds a tensor of the model
    codes,       ///< codes of a quantised tensor
    scales,      ///< scales of a quantised tensor
    description  ///< another part of a quantised tensor
  };
  /// The quantised tensor to which codes belong.
  struct Codes {
    QuantizedWeights::Format format = QuantizedWeights::Format::fp8;
    std::string weight;  ///< its name after dequantisation
    std::string type;    ///< its type then: "BF16"
    std::string scales;  ///< name of the tensor with its scales
  };
  struct Tensor {
    std::string name;
    std::string dtype;
    std::vector<std::uint64_t> shape;
    Bytes bytes = 0;
    Role role = Role::weight;
    Codes codes = {};  ///< only if the tensor has this role
    /// Name of the tensor whose values this one repeats: the embedding, for a tied output matrix.
    std::string copy_of = {};
  };
  struct File {
    std::string name;
    std::map<std::string, std::string> metadata;
    std::vector<Tensor> tensors;  ///< in the order of their data
  };

  std::vector<File> files;
  std::optional<text::Json> index;  ///< metadata of the index, if the folder has one
  text::Json quantization;          ///< quantization_config of config.json, or null
};

/// The layout of `weights`, whose config.json is `description`. A single file gets its usual name.
FolderLayout layout_of(const WeightFiles& weights, const text::Json& description);

/// The text of kImportedLayout.
std::string to_text(const FolderLayout& layout);
/// The layout recorded in `folder`; nothing if there is none. Throws Error(data) naming the file if
/// it is damaged.
std::optional<FolderLayout> recorded_layout(const std::filesystem::path& folder);

/// Places of all tensors of files as they are stored, also the codes and scales of quantised ones.
class StoredPlaces {
 public:
  /// `weights` must outlive the object.
  explicit StoredPlaces(const WeightFiles& weights);
  /// The place of the tensor `name`; nullptr if there is none. Valid as long as the object.
  [[nodiscard]] const WeightPlace* find(const std::string& name) const;

 private:
  std::deque<WeightPlace> places_;
  std::unordered_map<std::string, const WeightPlace*> found_;
};

/// Whether Ballast can write codes of this format, and mixes them with weights that are not
/// quantised.
bool is_written(QuantizedWeights::Format format);

}  // namespace ballast::formats
