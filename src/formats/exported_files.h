#pragma once

#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"
#include "ballast/formats/model_folder.h"
#include "ballast/formats/weight_files.h"

#include "src/formats/adapter_files.h"
#include "src/formats/copied_tensors.h"
#include "src/formats/folder_layout.h"

namespace ballast::formats {

struct ExportRules {
  std::optional<DType> type;        ///< type of all weights; unset: the types of the layout
  bool codes = false;               ///< quantise changed weights as the layout has them
  std::optional<Bytes> shard_size;  ///< divide the tensors anew into files of this size
};

/// The files of an export by the layout of a folder. Tensors that are stored as in the layout are
/// copied byte by byte, codes with their scales. Other values are converted to the types of the
/// layout. With `ExportRules::type` all weights get this type. Only whole numbers, corrections of
/// routers, and the tensors that pass through (folder_layout.h) and are not quantised keep
/// theirs.
class ExportedFiles {
 public:
  /// `weights` has the tensors of the layout, perhaps dequantised. It and `merged` (null: no
  /// adapters) must outlive the object. Throws Error(data) naming the tensor if one is missing or
  /// has another shape or a type that weights cannot have.
  ExportedFiles(const WeightFiles& weights, const MergedAdapters* merged, FolderLayout layout,
                const ExportRules& rules);

  [[nodiscard]] const std::vector<std::vector<CopiedTensor>>& tensors() const { return tensors_; }
  /// The files for ModelFolderWriter.
  [[nodiscard]] std::vector<FolderFile> files() const;
  /// Metadata of the index, if there is one.
  [[nodiscard]] std::optional<text::Json> index() const;
  /// Names of weights that are written as codes.
  [[nodiscard]] const std::vector<std::string>& codes() const { return codes_; }
  /// Names of weights that the layout has as codes, but the export does not.
  [[nodiscard]] const std::vector<std::string>& dequantized() const { return dequantized_; }

 private:
  using Tensor = FolderLayout::Tensor;

  void arrange();
  void add_weight(const Tensor& tensor);
  void add_codes(const Tensor& tensor);
  void add_scales(const Tensor& tensor);
  void add_merged();
  /// Whether the tensor scales inputs of a matrix that is written without codes.
  [[nodiscard]] bool is_idle_scale(const Tensor& tensor) const;
  void divide(Bytes largest);
  /// Whether the files have this stored tensor and nothing changes it.
  [[nodiscard]] bool is_as_stored(const Tensor& tensor) const;
  [[nodiscard]] bool is_changed(const std::string& name) const;
  [[nodiscard]] const WeightPlace& source_of(const Tensor& tensor, const std::string& name) const;
  [[nodiscard]] CopiedTensor values_of(const std::string& name, const WeightPlace& source,
                                       DType type) const;
  [[nodiscard]] EncodedTensor encoded(const Tensor& tensor, const WeightPlace& source) const;

  const WeightFiles& weights_;
  const MergedAdapters* merged_;
  FolderLayout layout_;
  ExportRules rules_;
  StoredPlaces places_;
  std::unordered_map<std::string, const Tensor*> scales_;  ///< scales in the layout, by name
  std::unordered_set<std::string> copied_;                 ///< names of scales that are copied
  std::unordered_set<std::string> written_;     ///< names of scales that are written with codes
  std::unordered_set<std::string> stay_codes_;  ///< names of codes that are copied or written
  std::vector<std::string> codes_;
  std::vector<std::string> dequantized_;
  std::vector<std::vector<CopiedTensor>> tensors_;
};

/// The config.json `text` for a folder with these weights as codes, and others that `quantization`,
/// its quantization_config, also described but that are no longer quantised. Lists the modules of
/// the latter. The module of all experts of a layer stands for each of them.
std::string describe_codes(const std::string& text, const text::Json& quantization,
                           const std::vector<std::string>& codes,
                           const std::vector<std::string>& dequantized);

}  // namespace ballast::formats
