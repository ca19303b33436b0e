#include "ballast/formats/model_folder.h"

#include <algorithm>
#include <array>
#include <memory>
#include <system_error>
#include <unordered_map>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>

#include "ballast/config/adapter_folder.h"
#include "ballast/config/hugging_face_config.h"
#include "ballast/core/error.h"
#include "ballast/formats/safetensors_header.h"
#include "ballast/formats/weight_files.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

#include "src/formats/new_folder.h"
#include "src/formats/write_behind.h"

namespace ballast::formats {
namespace {

namespace fs = std::filesystem;
using text::Json;

constexpr std::string_view kCarried =
    "generation_config.json tokenizer.json tokenizer.model tokenizer_config.json "
    "special_tokens_map.json added_tokens.json vocab.json merges.txt vocab.txt "
    "tiktoken.model tekken.json "
    "chat_template.jinja chat_template.json preprocessor_config.json processor_config.json "
    "video_preprocessor_config.json";

/// Beginnings of the names of Python files that config.json's auto_map names.
constexpr std::string_view kClasses =
    "configuration_ modeling_ tokenization_ processing_ image_processing_ video_processing_";

bool is_carried(const std::string& name) {
  if (text::has_word(kCarried, name)) return true;
  const auto begins = text::words_of(kClasses);
  return name.ends_with(".py") &&
         std::any_of(begins.begin(), begins.end(),
                     [&](std::string_view begin) { return name.starts_with(begin); });
}

[[noreturn]] void fail(const std::string& message, int error_number) {
  throw Error(ErrorCategory::io, message, error_number);
}

bool is_written_by_us(const fs::path& file) {
  const std::string name = file.filename().string();
  return name == config::kCheckpointConfig || name == kWeightsIndex ||
         name == config::kAdapterConfig || name == config::kAdapterWeights ||
         name == kImportedLayout || (name.starts_with("model") && name.ends_with(".safetensors")) ||
         is_carried(name);
}

Bytes bytes_of(const std::vector<FolderFile>& files) {
  Bytes sum = 0;
  for (const FolderFile& file : files) {
    for (const TensorToStore& tensor : file.tensors) sum += bytes_of(tensor);
  }
  return sum;
}

}  // namespace

std::vector<std::vector<TensorToStore>> split_into_files(std::vector<TensorToStore> tensors,
                                                         Bytes largest) {
  std::vector<std::vector<TensorToStore>> files(1);
  Bytes used = 0;
  for (TensorToStore& tensor : tensors) {
    const Bytes bytes = bytes_of(tensor);
    if (!files.back().empty() && (bytes > largest || used > largest - bytes)) {
      files.emplace_back();
      used = 0;
    }
    used += bytes;
    files.back().push_back(std::move(tensor));
  }
  return files;
}

std::vector<FolderFile> name_files(std::vector<std::vector<TensorToStore>> files,
                                   const std::string& single) {
  std::vector<FolderFile> named;
  for (std::vector<TensorToStore>& tensors : files) {
    const std::string name =
        fmt::format("model-{:05}-of-{:05}.safetensors", named.size() + 1, files.size());
    named.push_back({files.size() == 1 ? single : name, std::move(tensors)});
  }
  return named;
}

struct ModelFolderWriter::State {
  struct File {
    FolderFile written;
    Elems left = 0;  // number of missing values, and of bytes of copied tensors
    std::unique_ptr<SafetensorsWriter> writer = nullptr;  // set while it is open
    bool finished = false;
  };
  NewFolder folder;
  Bytes total = 0;
  std::optional<Json> index_metadata;
  std::shared_ptr<WriteBuffers> buffers = std::make_shared<WriteBuffers>();
  std::vector<File> files = {};
  std::unordered_map<std::string, std::size_t> file_of = {};  // by tensor

  void add(FolderFile file);
  void open(std::size_t file);
  template <class Write>
  void write(const std::string& name, Elems count, const Write& write);
  void finish(std::size_t file);
  [[nodiscard]] std::string index() const;
};

void ModelFolderWriter::State::add(FolderFile added) {
  File& file = files.emplace_back(File{std::move(added)});
  for (const TensorToStore& tensor : file.written.tensors) {
    const bool copied = !tensor.copied_dtype.empty();
    file.left += bytes_of(tensor) / (copied ? 1 : size_of(tensor.dtype));
    expects(file_of.emplace(tensor.name, files.size() - 1).second,
            "two tensors of a model have the same name");
  }
}

void ModelFolderWriter::State::open(std::size_t file) {
  if (files[file].writer != nullptr) return;
  const FolderFile& opened = files[file].written;
  files[file].writer = std::make_unique<SafetensorsWriter>(
      folder.temporary() / opened.name, opened.tensors, opened.metadata, buffers);
}

/// Calls `write(writer)` for `count` values of a tensor, or bytes of a copied one.
template <class Write>
void ModelFolderWriter::State::write(const std::string& name, Elems count, const Write& write) {
  if (count == 0) return;
  const auto found = file_of.find(name);
  expects(found != file_of.end(), "a tensor to write is not in the model");
  File& file = files[found->second];
  expects(count <= file.left, "too many values for a file of a model");
  open(found->second);
  write(*file.writer);
  file.left -= count;
  if (file.left == 0) finish(found->second);
}

void ModelFolderWriter::State::finish(std::size_t file) {
  File& one = files[file];
  if (one.finished) return;
  open(file);  // opens it even if its tensors are empty
  one.writer->finish();
  one.writer.reset();
  one.finished = true;
}

std::string ModelFolderWriter::State::index() const {
  Json map = Json::object();
  for (const File& file : files) {
    for (const TensorToStore& tensor : file.written.tensors) {
      map.add(tensor.name, file.written.name);
    }
  }
  Json metadata = *index_metadata;
  metadata["total_size"] = total;
  return Json::object({{"metadata", metadata}, {"weight_map", map}}).pretty() + "\n";
}

ModelFolderWriter::ModelFolderWriter(fs::path folder, std::vector<FolderFile> files,
                                     std::optional<Json> index) {
  const Bytes total = bytes_of(files);
  state_.reset(new State{{std::move(folder), total}, total, std::move(index)});
  for (FolderFile& file : files) state_->add(std::move(file));
}

ModelFolderWriter::ModelFolderWriter(fs::path folder, const std::vector<FolderFile>& files)
    : ModelFolderWriter(std::move(folder), files,
                        files.size() > 1 ? std::optional(Json::object()) : std::nullopt) {}

ModelFolderWriter::~ModelFolderWriter() = default;

void ModelFolderWriter::write(const std::string& name, std::span<const float> values, Elems first) {
  state_->write(name, values.size(),
                [&](SafetensorsWriter& writer) { writer.write(name, values, first); });
}

void ModelFolderWriter::write_stored(const std::string& name, std::span<const std::byte> bytes,
                                     DType type, Elems first) {
  state_->write(name, bytes.size() / size_of(type),
                [&](SafetensorsWriter& writer) { writer.write_stored(name, bytes, type, first); });
}

void ModelFolderWriter::write_bytes(const std::string& name, std::span<const std::byte> bytes,
                                    Bytes first) {
  state_->write(name, bytes.size(),
                [&](SafetensorsWriter& writer) { writer.write_bytes(name, bytes, first); });
}

void ModelFolderWriter::add(const std::string& name, std::string_view content) {
  state_->folder.add(name, content);
}

void ModelFolderWriter::carry(const fs::path& from) {
  std::error_code error;
  for (fs::directory_iterator entry(from, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    std::error_code ignored;
    if (!is_carried(name) || !fs::is_regular_file(entry->path(), ignored)) continue;
    add(name, read_small_file(entry->path()));
  }
  if (error) fail(fmt::format("cannot read {}", from.string()), error.value());
}

void ModelFolderWriter::finish() {
  State& s = *state_;
  for (std::size_t file = 0; file < s.files.size(); ++file) s.finish(file);
  if (s.index_metadata) add(kWeightsIndex, s.index());
  s.folder.finish();
}

void check_removable(const fs::path& folder) {
  std::error_code error;
  if (!fs::exists(folder, error)) return;
  for (fs::directory_iterator entry(folder, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    if (is_written_by_us(entry->path())) continue;
    throw Error(ErrorCategory::usage,
                fmt::format("{} is not a file of a model, so {} is not replaced; move it away or "
                            "choose another run directory with --out",
                            entry->path().string(), folder.string()));
  }
  if (error) fail(fmt::format("cannot replace {}", folder.string()), error.value());
}

void remove_model_folder(const fs::path& folder) {
  check_removable(folder);
  std::error_code error;
  fs::remove_all(folder, error);
  if (error) fail(fmt::format("cannot replace {}", folder.string()), error.value());
}

std::string read_small_file(const fs::path& path) {
  const auto file = text::open_file(path, O_RDONLY, ErrorCategory::data);
  const Bytes size = text::regular_file_size(file, path, ErrorCategory::data);
  if (size > kGiB) {
    throw Error(ErrorCategory::data, fmt::format("{} has more than 1 GiB", path.string()));
  }
  std::string content(size, '\0');
  text::read_fully(file, path, 0, std::as_writable_bytes(std::span(content)));
  return content;
}

}  // namespace ballast::formats
