#include "src/data/documents.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/random.h"
#include "ballast/data/sequences.h"
#include "ballast/formats/file_formats.h"
#include "ballast/formats/safetensors.h"

#include "src/formats/data_files.h"

namespace ballast::data {
namespace {

constexpr const char* kTokens = "tokens";
constexpr const char* kMask = "mask";
constexpr const char* kDocuments = "documents";
constexpr const char* kPairs = "pairs";
constexpr std::uint64_t kPiece = std::uint64_t{1} << 20;  // elements checked at a time
constexpr std::uint64_t kPackingEpoch = ~std::uint64_t{0};

struct DocumentFile {
  formats::SafetensorsReader reader;
  std::uint64_t first = 0;  // index of its first token over all files
  std::uint64_t tokens = 0;
  std::uint64_t documents = 0;
  bool masked = false;

  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(ErrorCategory::data, fmt::format("{}: {}", reader.path().string(), what));
  }
};

std::string metadata_of(const formats::SafetensorsReader& reader, const std::string& key) {
  const auto found = reader.metadata().find(key);
  return found == reader.metadata().end() ? "" : found->second;
}

/// Returns the tensor `name`, which must be a list of one of `dtypes`.
const formats::StoredTensor& list_of(const DocumentFile& file, const std::string& name,
                                     const std::vector<std::string>& dtypes) {
  const formats::StoredTensor* const tensor = file.reader.find(name);
  if (tensor == nullptr) file.refuse(fmt::format("has no tensor '{}'", name));
  if (std::find(dtypes.begin(), dtypes.end(), tensor->dtype) == dtypes.end()) {
    file.refuse(fmt::format("tensor '{}' has dtype {}; it can be {}", name, tensor->dtype,
                            fmt::join(dtypes, ", ")));
  }
  if (tensor->shape.size() != 1) {
    file.refuse(fmt::format("tensor '{}' has {} dimensions, not one", name, tensor->shape.size()));
  }
  return *tensor;
}

void check_metadata(const DocumentFile& file, bool pairs) {
  if (metadata_of(file.reader, "format") != "ballast documents") {
    file.refuse(
        "the metadata do not say format \"ballast documents\": make the file with "
        "tools/prepare.py");
  }
  if (const auto version = metadata_of(file.reader, "version"); version != "1") {
    file.refuse(
        fmt::format("has version '{}' of the format; this program reads version 1", version));
  }
  if (metadata_of(file.reader, kPairs).empty() != pairs) return;
  file.refuse(pairs ? "has no pairs: name it as data.documents, or make it with tools/prepare.py "
                      "--pairs"
                    : "has pairs: name it as data.pairs");
}

/// Refuses a file that does not begin like safetensors.
void check_format(const std::filesystem::path& path, bool pairs,
                  const std::filesystem::path& model) {
  const formats::FileFormat format = formats::recognise(path);
  formats::refuse_other_format(path, format,
                               {.key = pairs ? "pairs" : "documents", .model = model});
  if (format != formats::FileFormat::unknown || path.extension() == ".safetensors") return;
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) return;
  throw Error(
      ErrorCategory::data,
      fmt::format("{} is not a safetensors file: tools/prepare.py makes files of documents; "
                  "if it holds token ids, name it as data.tokens",
                  path.string()));
}

DocumentFile open_file_of_documents(const std::filesystem::path& path, bool pairs,
                                    const std::filesystem::path& model) {
  check_format(path, pairs, model);
  DocumentFile file{.reader = formats::SafetensorsReader(path)};
  check_metadata(file, pairs);
  file.tokens = list_of(file, kTokens, {"U16", "U32", "I32"}).elements;
  file.masked = file.reader.find(kMask) != nullptr;
  if (file.masked) {
    const auto masks = list_of(file, kMask, {"U8"}).elements;
    if (masks != file.tokens) {
      file.refuse(
          fmt::format("tensor 'mask' has {} elements, but 'tokens' has {}", masks, file.tokens));
    }
  }
  const Elems bounds = list_of(file, kDocuments, {"I64", "U64"}).elements;
  if (bounds == 0) {
    file.refuse(
        "tensor 'documents' is empty; it must hold the first token of each document and "
        "the number of tokens");
  }
  file.documents = bounds - 1;
  if (pairs && file.documents % 2 == 1) {
    file.refuse(
        "tensor 'documents' has an odd number of documents, so the last one has no partner");
  }
  for (const auto& tensor : file.reader.tensors()) {
    if (tensor.name != kTokens && tensor.name != kMask && tensor.name != kDocuments) {
      file.refuse(fmt::format("tensor '{}' is not part of the format", tensor.name));
    }
  }
  return file;
}

/// Appends the offsets of the documents of `file`, counted over all files.
void append_offsets(const DocumentFile& file, std::vector<std::uint64_t>& offsets) {
  std::vector<std::int64_t> own(file.reader.find(kDocuments)->elements);
  file.reader.read_whole(kDocuments, own);
  if (own.front() != 0) {
    file.refuse(fmt::format("tensor 'documents' starts with {}, not with 0", own.front()));
  }
  for (std::size_t i = 1; i < own.size(); ++i) {
    if (own[i] < own[i - 1]) {
      file.refuse(fmt::format("tensor 'documents' is not ascending: element {} is {}, after {}", i,
                              own[i], own[i - 1]));
    }
    offsets.push_back(file.first + static_cast<std::uint64_t>(own[i]));
  }
  if (static_cast<std::uint64_t>(own.back()) != file.tokens) {
    file.refuse(fmt::format("tensor 'documents' ends with {}, but 'tokens' has {} elements",
                            own.back(), file.tokens));
  }
}

class PackedDocuments : public SequenceSource {
 public:
  PackedDocuments(std::shared_ptr<const DocumentFiles> files, DocumentRange range,
                  std::uint64_t length, bool shuffle, std::uint64_t seed)
      : files_(std::move(files)),
        packing_(cut_documents(files_->offsets().subspan(range.first, range.end - range.first + 1),
                               length),
                 length, shuffle ? std::optional(epoch_key(seed, kPackingEpoch)) : std::nullopt),
        shuffle_(shuffle),
        seed_(seed) {}

  [[nodiscard]] std::uint64_t size() const override { return packing_.sequences(); }
  [[nodiscard]] bool packed() const override { return true; }
  [[nodiscard]] std::uint64_t real_tokens(std::uint64_t n) const override {
    return packing_.tokens(sequence(n));
  }
  void read(std::uint64_t n, const SequenceSpans& out) const override;

 private:
  [[nodiscard]] std::uint64_t sequence(std::uint64_t n) const {
    const std::uint64_t index = n % size();
    return shuffle_ ? permute(index, size(), epoch_key(seed_, n / size())) : index;
  }

  std::shared_ptr<const DocumentFiles> files_;
  Packing packing_;
  bool shuffle_;
  std::uint64_t seed_;
};

void PackedDocuments::read(std::uint64_t n, const SequenceSpans& out) const {
  std::vector<std::int32_t> ids;
  std::vector<std::uint8_t> trained;
  std::size_t at = 0;
  std::fill(out.targets.begin(), out.targets.end(), kIgnoredTarget);
  for (const Piece& piece : packing_.pieces(sequence(n))) {
    ids.resize(piece.length + (piece.continues ? 1 : 0));
    trained.resize(ids.size());
    files_->read(piece.first, ids, trained);
    std::copy_n(ids.begin(), piece.length, out.tokens.begin() + static_cast<std::ptrdiff_t>(at));
    for (std::size_t i = 1; i < ids.size(); ++i) {
      if (trained[i] != 0) out.targets[at + i - 1] = ids[i];
    }
    const auto positions = out.positions.subspan(at, piece.length);
    std::iota(positions.begin(), positions.end(), 0);
    at += piece.length;
  }
  const auto padding = static_cast<std::ptrdiff_t>(at);
  std::fill(out.tokens.begin() + padding, out.tokens.end(), 0);
  std::fill(out.targets.begin() + padding, out.targets.end(), kPaddingTarget);
  std::iota(out.positions.begin() + padding, out.positions.end(), 0);
}

}  // namespace

struct DocumentFiles::Parts {
  std::vector<DocumentFile> files;
  std::vector<std::uint64_t> offsets = {0};
  std::uint64_t targets = 0;
  std::uint64_t vocab_size = 0;
  TokenTable limit;
  bool pairs = false;
  std::filesystem::path model;
  formats::TokenizerIdentity tokenizer;
  std::uint64_t untrained = 0;  // documents without a target
  std::uint64_t first_trained = ~std::uint64_t{0};
  std::uint64_t last_trained = 0;

  void add(const std::filesystem::path& path);
  void compare_tokenizer(const DocumentFile& file);
  void check(const DocumentFile& file);
  void count(const DocumentFile& file, std::uint64_t document, std::uint64_t document_targets);
  void read(const DocumentFile& file, std::uint64_t index, std::span<std::int32_t> tokens,
            std::span<std::uint8_t> trained) const;
};

void DocumentFiles::Parts::compare_tokenizer(const DocumentFile& file) {
  const formats::TokenizerIdentity own = {
      .name = metadata_of(file.reader, "tokenizer"),
      .serialised = metadata_of(file.reader, "tokenizer_sha256"),
      .vocabulary = metadata_of(file.reader, "vocabulary_sha256"),
      .added_tokens = metadata_of(file.reader, "added_tokens_sha256")};
  if (!files.empty() && formats::differ(own, tokenizer)) {
    file.refuse(fmt::format("was made with another tokenizer than {}: give files of one tokenizer",
                            files.front().reader.path().string()));
  }
  tokenizer = own;
}

void DocumentFiles::Parts::add(const std::filesystem::path& path) {
  DocumentFile file = open_file_of_documents(path, pairs, model);
  file.first = offsets.back();
  compare_tokenizer(file);
  append_offsets(file, offsets);
  check(file);
  files.push_back(std::move(file));
}

/// Adds the targets of a complete document.
void DocumentFiles::Parts::count(const DocumentFile& file, std::uint64_t document,
                                 std::uint64_t document_targets) {
  targets += document_targets;
  if (document_targets > 0) {
    first_trained = std::min(first_trained, document);
    last_trained = document;
    return;
  }
  ++untrained;
  if (!pairs) return;
  file.refuse(
      fmt::format("document {} of the pairs has no token that is trained on: tensor 'mask' "
                  "is 0 everywhere in it, or it has fewer than two tokens",
                  document));
}

/// Reads all of `file` and counts its targets. The first token of a document is not a target.
void DocumentFiles::Parts::check(const DocumentFile& file) {
  std::vector<std::int32_t> tokens;
  std::vector<std::uint8_t> trained;
  std::uint64_t sum = 0;  // targets of the current document
  const auto begin = offsets.end() - static_cast<std::ptrdiff_t>(file.documents) - 1;
  auto next = begin;
  const auto ends = [&] {
    if (next != begin) count(file, static_cast<std::uint64_t>(next - offsets.begin()) - 1, sum);
    sum = 0;
  };
  for (std::uint64_t done = 0; done < file.tokens; done += tokens.size()) {
    tokens.resize(std::min(kPiece, file.tokens - done));
    trained.resize(tokens.size());
    read(file, done, tokens, trained);
    const std::uint64_t first = file.first + done;
    std::uint64_t at = 0;
    for (; next != offsets.end() && *next < first + tokens.size(); ++next) {
      const std::uint64_t start = *next - first;
      sum +=
          std::accumulate(trained.begin() + static_cast<std::ptrdiff_t>(std::min(at, start)),
                          trained.begin() + static_cast<std::ptrdiff_t>(start), std::uint64_t{0});
      ends();
      at = start + 1;
    }
    sum += std::accumulate(trained.begin() + static_cast<std::ptrdiff_t>(at), trained.end(),
                           std::uint64_t{0});
  }
  for (; next != offsets.end(); ++next) ends();
}

void DocumentFiles::Parts::read(const DocumentFile& file, std::uint64_t index,
                                std::span<std::int32_t> tokens,
                                std::span<std::uint8_t> trained) const {
  std::vector<std::int64_t> values(tokens.size());
  file.reader.read_whole(kTokens, values, index);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto id = static_cast<std::uint64_t>(values[i]);
    if (values[i] < 0 || id >= limit.rows) {
      file.refuse(fmt::format(
          "tensor 'tokens' holds id {} at element {}, but {} is {}: {}", values[i], index + i,
          limit.key, limit.rows,
          values[i] >= 0 && id < vocab_size ? kNoRow : "was the file made for another model?"));
    }
    tokens[i] = static_cast<std::int32_t>(values[i]);
  }
  if (!file.masked) {
    std::fill(trained.begin(), trained.end(), std::uint8_t{1});
    return;
  }
  file.reader.read_whole(kMask, values, index);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i] > 1) {
      file.refuse(fmt::format("tensor 'mask' holds {} at element {}; it can be 0 or 1", values[i],
                              index + i));
    }
    trained[i] = static_cast<std::uint8_t>(values[i]);
  }
}

DocumentFiles::DocumentFiles(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
DocumentFiles::DocumentFiles(DocumentFiles&&) noexcept = default;
DocumentFiles& DocumentFiles::operator=(DocumentFiles&&) noexcept = default;
DocumentFiles::~DocumentFiles() = default;

DocumentFiles DocumentFiles::open(std::span<const std::string> patterns, std::uint64_t vocab_size,
                                  bool pairs, const std::filesystem::path& model,
                                  const std::optional<TokenTable>& table) {
  auto parts = std::make_unique<Parts>();
  parts->model = model;
  parts->vocab_size = std::min<std::uint64_t>(vocab_size, std::uint64_t{1} << 31);
  parts->limit = limit_of_ids(vocab_size, table);
  parts->pairs = pairs;
  for (const auto& listed : formats::list_files(patterns, formats::FolderFilter::documents))
    parts->add(listed.path);
  if (parts->targets == 0) {
    parts->files.back().refuse(
        "no token is trained on: tensor 'mask' is 0 everywhere, or no document has two tokens");
  }
  if (parts->untrained > 0) {
    log(LogLevel::warning,
        fmt::format("{} of {} documents in {} have nothing to train on: tensor 'mask' is 0 "
                    "everywhere in them, or they have fewer than two tokens",
                    parts->untrained, parts->offsets.size() - 1,
                    parts->files.size() == 1 ? parts->files.front().reader.path().string()
                                             : fmt::format("{} files", parts->files.size())));
  }
  return DocumentFiles(std::move(parts));
}

std::vector<std::filesystem::path> DocumentFiles::files() const {
  std::vector<std::filesystem::path> paths;
  for (const auto& file : parts_->files) paths.push_back(file.reader.path());
  return paths;
}

std::span<const std::uint64_t> DocumentFiles::offsets() const {
  return parts_->offsets;
}

std::uint64_t DocumentFiles::targets() const {
  return parts_->targets;
}

const formats::TokenizerIdentity& DocumentFiles::tokenizer() const {
  return parts_->tokenizer;
}

std::uint64_t DocumentFiles::first_trained() const {
  return parts_->first_trained;
}

std::uint64_t DocumentFiles::last_trained() const {
  return parts_->last_trained;
}

void DocumentFiles::read(std::uint64_t first, std::span<std::int32_t> tokens,
                         std::span<std::uint8_t> trained) const {
  const auto& files = parts_->files;
  // The last file that starts at or before `first`.
  auto file = std::upper_bound(files.begin(), files.end(), first,
                               [](auto index, const auto& f) { return index < f.first; });
  expects(file != files.begin(), "documents: there is no file");
  --file;
  const std::uint64_t index = first - file->first;
  expects(index <= file->tokens && tokens.size() <= file->tokens - index,
          "documents: the range reaches beyond a file");
  parts_->read(*file, index, tokens, trained);
}

std::uint64_t training_documents(std::span<const std::uint64_t> offsets, double held_out) {
  const std::uint64_t total = offsets.back();
  const auto held = static_cast<std::uint64_t>(std::floor(static_cast<double>(total) * held_out));
  const auto first =
      std::lower_bound(offsets.begin(), offsets.end(), total - std::min(held, total));
  return static_cast<std::uint64_t>(first - offsets.begin());
}

std::shared_ptr<const SequenceSource> packed(std::shared_ptr<const DocumentFiles> files,
                                             DocumentRange range, std::uint64_t length,
                                             bool shuffle, std::uint64_t seed) {
  expects(length >= 1 && range.first <= range.end && range.end < files->offsets().size(),
          "documents: the range reaches beyond the files");
  return std::make_shared<const PackedDocuments>(std::move(files), range, length, shuffle, seed);
}

}  // namespace ballast::data
