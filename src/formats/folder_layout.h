#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "ballast/core/units.h"
#include "ballast/formats/safetensors.h"
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

// Tensors of a folder that the text model does not use. They pass through a run: the folder that it
// writes has their bytes.

namespace ballast::formats {

/// Parts of a model of which the tensors pass through.
enum class PassingPart : std::uint8_t {
  mtp,        ///< layers for multi-token prediction (DeepSeek, arXiv:2412.19437, section 2.2)
  vision,     ///< encoders of images and videos
  audio,      ///< encoders of audio
  projector,  ///< maps from these encoders to the text model
  indexer,    ///< the choice of tokens for sparse attention (DeepSeek, "DeepSeek-V3.2", 2025)
  /// maps and norms of keys and values in layers that attend to those of other layers (Gemma 4)
  unread_keys,
  activation_scales  ///< scales of the inputs of matrices in FP8, for computing in FP8
};

/// Returns "MTP layers", "vision", "audio", "projector", "indexers", "unread keys and values" or
/// "scales of activations".
std::string_view to_string(PassingPart part);

/// The part that tensor `name` of the files belongs to; nothing if it belongs to the text model, or
/// to nothing that is known. A layer is one for multi-token prediction if it has an eh_proj. Which
/// layers do not read their own keys follows from num_kv_shared_layers in the folder's config.json.
std::optional<PassingPart> passing_part(const WeightFiles& files, const std::string& name);

struct TensorTotals {
  std::size_t tensors = 0;
  Elems elements = 0;
  Bytes bytes = 0;

  void add(const WeightPlace& place);
};

/// Size of the tensors that pass through, by part.
std::map<PassingPart, TensorTotals> passing_totals(const WeightFiles& files);

/// Describes the parts: "vision 87 tensors, 412 M parameters, 824 MiB"; "" if there are none.
std::string describe(const std::map<PassingPart, TensorTotals>& totals);

/// The tensors that pass through, in file order.
std::vector<const WeightPlace*> passing_tensors(const WeightFiles& files);

}  // namespace ballast::formats
