#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"
#include "ballast/core/units.h"
#include "ballast/engine/engine.h"
#include "ballast/formats/model_folder.h"
#include "ballast/formats/weight_files.h"
#include "ballast/model/architecture.h"

#include "src/formats/copied_tensors.h"
#include "src/formats/folder_layout.h"

namespace ballast::train {

/// The files that a run imports, for the weights that it saves: names, the layout of the folder,
/// and the tensors that the run does not change. These are frozen tensors, those that pass through
/// (src/formats/folder_layout.h) and other buffers. Empty for a model with adapters, which are
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

/// Called with the bytes that are done and the total.
using Progress = std::function<void(Bytes done, Bytes total)>;

/// Throws Error(io) if the disk of the run directory lacks room for the weights of `config`.
void check_room_for_weights(const config::Config& config, const model::Architecture& model);

/// Returns the tensors of a model in files, as F32. Tensors that are spread over several blocks are
/// whole.
std::vector<formats::TensorToStore> tensors_of(const model::Architecture& model);
/// Writes the `values` of a block (flat) to their places in the model's tensors.
void write_block(formats::ModelFolderWriter& writer, const model::BlockSpec& block,
                 std::span<const float> values);

/// Returns whether the run directory has weights. Collective; rank 0 decides.
bool has_saved_weights(const config::Config& config, comm::Ranks* ranks);

/// Writes the master weights of `engine` as F32 to the run directory: a Hugging Face folder with
/// the config.json, generation_config.json and tokenizer of the imported model, the bytes of its
/// tensors that do not change (ImportedFiles) and its layout, or a config.json made from `config`;
/// for a model with adapters, a PEFT folder. Keeps one block in memory at a time. Collective over
/// the ranks; the `first` one writes. Throws Error(io).
void save_weights(engine::Engine& engine, const config::Config& config, bool first,
                  const Progress& progress);

}  // namespace ballast::train
