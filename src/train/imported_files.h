#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "ballast/config/config.h"
#include "ballast/core/units.h"
#include "ballast/formats/weight_files.h"
#include "ballast/model/architecture.h"

#include "src/formats/copied_tensors.h"
#include "src/formats/folder_layout.h"

namespace ballast::train {

/// The files that a run imports, for the weights that it saves: names, the layout of the folder,
/// and the tensors that the run does not change. These are frozen tensors, those that pass through
/// (formats/passing_tensors.h) and other buffers. Empty for a model with adapters, which are
/// separate from these files, and for a model that is not imported.
class ImportedFiles {
 public:
  ImportedFiles(const config::Config& config, const model::Architecture& model);

  /// The tensor of the files that has the values of a tensor of the model.
  struct Target {
    std::string name;
    std::vector<std::uint64_t> shape;
    Elems first = 0;  ///< index of the first value in it: not 0 in a stack of experts
  };
  /// The target of `tensor`, or a tensor with the model's name if the files do not have it.
  [[nodiscard]] Target target_of(const model::TensorSpec& tensor) const;
  /// Whether the bytes of the model's tensor are copied.
  [[nodiscard]] bool copies(const model::TensorSpec& tensor) const;
  /// All tensors that are copied, in file order. Codes are copied with their scales.
  [[nodiscard]] const std::vector<formats::CopiedTensor>& copied() const { return copied_; }
  [[nodiscard]] Bytes copied_bytes() const;
  /// Layout for formats::kImportedLayout. Nothing if the files are the weights of a run that
  /// imported none.
  [[nodiscard]] const std::optional<formats::FolderLayout>& layout() const { return layout_; }
  /// The config.json `text` of the files for the saved weights: trained weights are not quantised.
  [[nodiscard]] std::string describe(const std::string& text) const;
  /// Copies the tensors to `writer`. Calls `progress` with the bytes copied.
  void copy(formats::ModelFolderWriter& writer,
            const std::function<void(Bytes done)>& progress) const;

 private:
  void find_trained(const model::Architecture& model);
  void find_copied();
  void record_layout(const model::Architecture& model);
  [[nodiscard]] std::string name_of(const std::string& name) const;

  std::optional<formats::WeightFiles> files_;
  std::optional<formats::StoredPlaces> stored_;
  std::unordered_set<const formats::WeightPlace*>
      written_;  ///< stored tensors whose values are written
  std::vector<formats::CopiedTensor> copied_;
  std::vector<std::string> codes_;        ///< names of weights whose codes are copied
  std::vector<std::string> dequantized_;  ///< names of quantised weights whose values are written
  std::optional<formats::FolderLayout> layout_;
};

}  // namespace ballast::train
