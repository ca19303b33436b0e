#include "ballast/data/tokens.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <span>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/formats/file_formats.h"
#include "ballast/text/files.h"

#include "src/formats/data_files.h"

namespace ballast::data {

namespace {

// Files beyond this number are opened for each read, because descriptors are limited.
constexpr std::size_t kHeldOpen = 64;

struct SourceFile {
  std::filesystem::path path;
  std::uint64_t first = 0;  // index of its first token over all files
  Bytes bytes = 0;          // size of the file
  formats::TokenLayout layout;
  Descriptor descriptor;  // may be closed
};

/// Decodes an id. Negative ids become 2^63 or more.
std::uint64_t decode(const std::byte* bytes, const formats::TokenLayout& layout) {
  std::uint64_t id = 0;
  for (std::size_t i = 0; i < layout.width; ++i) {
    id |= static_cast<std::uint64_t>(bytes[i]) << (8 * i);
  }
  const std::size_t bits = 8 * layout.width;
  const bool negative = layout.is_signed && (id >> (bits - 1)) != 0;
  return negative && bits < 64 ? id | (~std::uint64_t{0} << bits) : id;
}

/// Returns whether the file's name is that of a web page.
bool is_named_html(const std::filesystem::path& path) {
  const auto extension = path.extension();
  return extension == ".html" || extension == ".htm" || extension == ".xhtml";
}

/// Refuses a file that is given as text but is not text.
void check_text(const std::filesystem::path& path, const Descriptor& file, Bytes size,
                std::uint64_t vocab_size, const std::filesystem::path& model) {
  const formats::FileFormat format = formats::recognise(path, file, size);
  if (format == formats::FileFormat::html && is_named_html(path)) return;
  const bool json =
      format == formats::FileFormat::json_lines || format == formats::FileFormat::json_array;
  if (json && vocab_size <= kLargestByteVocabulary) {
    log(LogLevel::warning,
        fmt::format("data: {} holds JSON, which is read byte by byte with its keys and quotes",
                    path.string()));
    return;
  }
  formats::refuse_other_format(path, format, {.key = "text", .model = model});
  if (format == formats::FileFormat::unknown && path.extension() == ".bin") {
    throw Error(ErrorCategory::data,
                fmt::format("{} is not text; if it holds token ids, name it as data.tokens, or set "
                            "data.as_is to true to read its bytes",
                            path.string()));
  }
}

void check_keys(const config::DataSection& data) {
  if (data.text.empty() == data.tokens.empty()) {
    throw Error(ErrorCategory::config, "give exactly one of data.text and data.tokens");
  }
}

}  // namespace

struct TokenSource::Parts {
  std::vector<SourceFile> files;
  std::uint64_t size = 0;
  std::uint64_t vocab_size = 0;
  TokenTable limit;

  void add(const formats::ListedFile& listed, const config::DataSection& data,
           const std::filesystem::path& model);
  [[noreturn]] void refuse_id(const SourceFile& file, const Descriptor& descriptor,
                              std::uint64_t index, std::uint64_t id) const;
  void read(const SourceFile& file, std::uint64_t index, std::span<std::int32_t> out,
            std::vector<std::byte>& scratch) const;
};

void TokenSource::Parts::add(const formats::ListedFile& listed, const config::DataSection& data,
                             const std::filesystem::path& model) {
  const std::filesystem::path& path = listed.path;
  // Without O_NONBLOCK, opening a named pipe would wait for a writer.
  auto descriptor = text::open_file(path, O_RDONLY | O_NONBLOCK, ErrorCategory::data);
  const auto bytes = text::regular_file_size(descriptor, path, ErrorCategory::data);
  formats::TokenLayout layout = {.width = 1, .count = bytes};
  if (data.text.empty()) {
    const formats::TokenUse use = {data.token_type, vocab_size, model, data.as_is};
    layout = formats::layout_of(path, descriptor, use);
  } else if (!listed.in_folder && !data.as_is) {
    check_text(path, descriptor, bytes, vocab_size, model);
  }
  if (files.size() >= kHeldOpen) descriptor = Descriptor();
  files.push_back({path, size, bytes, layout, std::move(descriptor)});
  size += layout.count;
}

void TokenSource::Parts::refuse_id(const SourceFile& file, const Descriptor& descriptor,
                                   std::uint64_t index, std::uint64_t id) const {
  const Bytes at = file.layout.offset + index * file.layout.width;
  const auto value = static_cast<std::int64_t>(id);
  const bool negative = file.layout.is_signed && value < 0;
  throw Error(ErrorCategory::data,
              fmt::format("{} holds token id {} at byte {} (token {}), but {} is {}: {}",
                          file.path.string(), negative ? std::to_string(value) : std::to_string(id),
                          at, index, limit.key, limit.rows,
                          negative          ? "does the file hold labels instead of token ids?"
                          : id < vocab_size ? kNoRow
                                            : formats::advice_for_id(file.path, descriptor,
                                                                     file.layout, at, vocab_size)));
}

void TokenSource::Parts::read(const SourceFile& file, std::uint64_t index,
                              std::span<std::int32_t> out, std::vector<std::byte>& scratch) const {
  Descriptor opened;
  if (!file.descriptor.is_open())
    opened = text::open_file(file.path, O_RDONLY, ErrorCategory::data);
  const Descriptor& descriptor = file.descriptor.is_open() ? file.descriptor : opened;
  const auto bytes = text::regular_file_size(descriptor, file.path, ErrorCategory::data);
  if (bytes != file.bytes) {
    throw Error(ErrorCategory::data,
                fmt::format("{} had {} bytes when it was opened and has {} now: it was changed "
                            "while in use",
                            file.path.string(), file.bytes, bytes));
  }
  const std::size_t width = file.layout.width;
  scratch.resize(out.size() * width);
  text::read_fully(descriptor, file.path, file.layout.offset + index * width, scratch);
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto id = decode(scratch.data() + i * width, file.layout);
    if (id >= limit.rows) refuse_id(file, descriptor, index + i, id);
    out[i] = static_cast<std::int32_t>(id);
  }
}

TokenSource::TokenSource(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
TokenSource::TokenSource(TokenSource&&) noexcept = default;
TokenSource& TokenSource::operator=(TokenSource&&) noexcept = default;
TokenSource::~TokenSource() = default;

TokenSource TokenSource::open(const config::DataSection& data, std::uint64_t vocab_size,
                              const std::filesystem::path& model,
                              const std::optional<TokenTable>& table) {
  auto parts = std::make_unique<Parts>();
  check_keys(data);
  parts->vocab_size = std::min<std::uint64_t>(vocab_size, std::uint64_t{1} << 31);
  parts->limit = limit_of_ids(vocab_size, table);
  const bool text = !data.text.empty();
  auto files =
      formats::list_files(text ? data.text : data.tokens,
                          text ? formats::FolderFilter::text : formats::FolderFilter::token_bin);
  // A folder of source code may have any text; one with only JSON Lines has documents.
  const bool only_json = text && std::all_of(files.begin(), files.end(), [](const auto& file) {
                           return formats::recognise(file.path) == formats::FileFormat::json_lines;
                         });
  for (formats::ListedFile& file : files) {
    file.in_folder = file.in_folder && !only_json;
    parts->add(file, data, model);
  }
  if (parts->size == 0) {
    const auto& path = parts->files.front().path;
    throw Error(ErrorCategory::data,
                parts->files.size() == 1
                    ? fmt::format("{} is empty", path.string())
                    : fmt::format("{} and all other files are empty", path.string()));
  }
  return TokenSource(std::move(parts));
}

std::uint64_t TokenSource::size() const {
  return parts_->size;
}

std::vector<std::filesystem::path> TokenSource::files() const {
  std::vector<std::filesystem::path> paths;
  for (const auto& file : parts_->files) paths.push_back(file.path);
  return paths;
}

std::vector<std::uint64_t> TokenSource::starts() const {
  std::vector<std::uint64_t> starts;
  for (const auto& file : parts_->files) starts.push_back(file.first);
  return starts;
}

void TokenSource::read(std::uint64_t first, std::span<std::int32_t> out) const {
  expects(first <= size() && out.size() <= size() - first,
          "tokens: the range reaches beyond the data");
  const auto& files = parts_->files;
  // The last file that begins at or before `first`. Empty files before it begin there too.
  auto file = std::upper_bound(files.begin(), files.end(), first,
                               [](auto index, const auto& f) { return index < f.first; });
  if (file != files.begin()) --file;
  std::vector<std::byte> scratch;
  for (; !out.empty(); ++file) {
    const auto index = first - file->first;
    const auto count = std::min<std::uint64_t>(out.size(), file->layout.count - index);
    if (count == 0) continue;
    parts_->read(*file, index, out.first(count), scratch);
    out = out.subspan(count);
    first += count;
  }
}

TokenSplit split_tokens(std::uint64_t total, double held_out, std::uint64_t length) {
  auto held = static_cast<std::uint64_t>(std::floor(static_cast<double>(total) * held_out));
  held = std::min(held, total);
  if (held < length + 1) held = 0;
  const auto training = total - held;
  if (training < length + 1) {
    throw Error(ErrorCategory::data,
                fmt::format("the data has {} tokens to train on, but one sequence needs {} "
                            "(data.sequence_length {} + 1): give more data or shorter sequences",
                            training, length + 1, length));
  }
  return {{0, training}, {training, held}};
}

namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::uint64_t kIdsAtATime = 1 << 20;

}  // namespace

void write_tokens(const TokenSource& source, const std::filesystem::path& path,
                  const text::OutputRule& rule, const std::atomic<bool>* interrupted) {
  text::OutputFile file(path, rule);
  std::vector<std::int32_t> ids;
  std::vector<std::uint16_t> packed;
  for (std::uint64_t done = 0; done < source.size(); done += ids.size()) {
    if (interrupted != nullptr && *interrupted) {
      throw Error(ErrorCategory::interrupted, "interrupted");
    }
    ids.resize(std::min(kIdsAtATime, source.size() - done));
    source.read(done, ids);
    packed.resize(ids.size());
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] < 0 || ids[i] > 0xffff) {
        throw Error(
            ErrorCategory::data,
            fmt::format("token {} has id {}, which does not fit 16 bits", done + i, ids[i]));
      }
      packed[i] = static_cast<std::uint16_t>(ids[i]);
    }
    file.write(std::as_bytes(std::span(packed)));
  }
  file.commit();
}

}  // namespace ballast::data
