#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/units.h"
#include "ballast/formats/safetensors.h"
#include "ballast/formats/weight_files.h"
#include "ballast/text/json.h"

namespace ballast::formats {

/// Default size limit of a file of weights, that of Hugging Face.
inline constexpr Bytes kShardSize = 5'000'000'000;
/// Name of the file in which a run's weights keep the layout of the folder that the run imported.
inline constexpr const char* kImportedLayout = "imported_layout.json";

/// Divides `tensors` in their order into the files of a model, each with at most `largest` bytes of
/// data or one tensor.
std::vector<std::vector<TensorToStore>> split_into_files(std::vector<TensorToStore> tensors,
                                                         Bytes largest);

/// A file of weights to write.
struct FolderFile {
  std::string name;
  std::vector<TensorToStore> tensors;
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
};

/// Names files as Hugging Face does: `single`, or model-00001-of-0000N.safetensors.
std::vector<FolderFile> name_files(std::vector<std::vector<TensorToStore>> files,
                                   const std::string& single = kSingleWeights);

/// Writes a Hugging Face folder. Everything goes to FOLDER.tmp-PID. finish() makes it durable and
/// renames it, so an incomplete folder never has the final name.
class ModelFolderWriter {
 public:
  /// Several files also get an index. Throws Error(io) if `folder` contains files, cannot be made,
  /// or its disk lacks the space for the weights.
  ModelFolderWriter(std::filesystem::path folder, const std::vector<FolderFile>& files);
  /// The index has this metadata, with the total size of the files; without `index`, there is none.
  ModelFolderWriter(std::filesystem::path folder, std::vector<FolderFile> files,
                    std::optional<text::Json> index);
  /// Removes the temporary folder unless finish() was called.
  ~ModelFolderWriter();
  ModelFolderWriter(const ModelFolderWriter&) = delete;
  ModelFolderWriter& operator=(const ModelFolderWriter&) = delete;

  /// Like SafetensorsWriter::write. A file is open from its first value to its last one.
  void write(const std::string& name, std::span<const float> values, Elems first = 0);
  /// Like SafetensorsWriter::write_stored.
  void write_stored(const std::string& name, std::span<const std::byte> bytes, DType type,
                    Elems first = 0);
  /// Like SafetensorsWriter::write_bytes.
  void write_bytes(const std::string& name, std::span<const std::byte> bytes, Bytes first);
  /// Adds a small file. Throws Error(io).
  void add(const std::string& name, std::string_view content);
  /// Copies generation_config.json, the files of the tokenizer and of processors of images and
  /// audio, and the Python files of the model's classes, if the folder `from` has them.
  void carry(const std::filesystem::path& from);
  /// Writes the index, syncs and renames. Throws Error(io), Error(state) if values are missing.
  void finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Removes a folder that ModelFolderWriter has written, if there is one. Throws Error(usage)
/// without removing anything if it contains other files; Error(io).
void remove_model_folder(const std::filesystem::path& folder);
/// Throws like remove_model_folder(), but removes nothing.
void check_removable(const std::filesystem::path& folder);

/// Content of a small file of a Hugging Face folder, at most 1 GiB. Throws Error(data).
std::string read_small_file(const std::filesystem::path& path);

}  // namespace ballast::formats
