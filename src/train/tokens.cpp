#include "ballast/train/tokens.h"

#include <algorithm>
#include <cmath>

#include <fcntl.h>
#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/text/files.h"

#include "src/train/text_files.h"
#include "src/train/token_formats.h"

namespace ballast::train {
namespace {

// Further files are opened for each read, since the number of descriptors is limited.
constexpr std::size_t kHeldOpen = 64;

struct SourceFile {
  std::filesystem::path path;
  std::uint64_t first = 0;  // index of its first token in the whole
  Bytes bytes = 0;          // of the file
  TokenLayout layout;
  Descriptor descriptor;  // may be closed
};

std::uint32_t decode(const std::byte* bytes, std::size_t width) {
  std::uint32_t id = 0;
  for (std::size_t i = 0; i < width; ++i) {
    id |= static_cast<std::uint32_t>(bytes[i]) << (8 * i);
  }
  return id;
}

void check_keys(const config::DataSection& data) {
  if (data.text.empty() == data.tokens.empty()) {
    throw Error(ErrorCategory::config, "give exactly one of data.text and data.tokens");
  }
  const auto& type = data.token_type;
  if (type != "auto" && type != "u16" && type != "u32") {
    throw Error(ErrorCategory::config,
                fmt::format("data.token_type is '{}': choose auto, u16 or u32", type));
  }
}

}  // namespace

struct TokenSource::Parts {
  std::vector<SourceFile> files;
  std::uint64_t size = 0;
  std::uint64_t vocab_size = 0;

  void add(const std::filesystem::path& path, const config::DataSection& data);
  void read(const SourceFile& file, std::uint64_t index, std::span<std::int32_t> out,
            std::vector<std::byte>& scratch) const;
};

void TokenSource::Parts::add(const std::filesystem::path& path, const config::DataSection& data) {
  // Without O_NONBLOCK a named pipe would wait here for a writer.
  auto descriptor = text::open_file(path, O_RDONLY | O_NONBLOCK, ErrorCategory::data);
  const auto bytes = text::regular_file_size(descriptor, path, ErrorCategory::data);
  const TokenLayout layout = data.text.empty()
                                 ? layout_of(path, descriptor, data.token_type, vocab_size)
                                 : TokenLayout{.width = 1, .count = bytes};
  if (files.size() >= kHeldOpen) descriptor = Descriptor();
  files.push_back({path, size, bytes, layout, std::move(descriptor)});
  size += layout.count;
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
  const Bytes start = file.layout.offset + index * width;
  scratch.resize(out.size() * width);
  text::read_fully(descriptor, file.path, start, scratch);
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto id = decode(scratch.data() + i * width, width);
    if (id >= vocab_size) {
      throw Error(ErrorCategory::data,
                  fmt::format("{} holds token id {} at byte {}, but model.vocab_size is {}: "
                              "check data.token_type or raise model.vocab_size",
                              file.path.string(), id, start + i * width, vocab_size));
    }
    out[i] = static_cast<std::int32_t>(id);
  }
}

TokenSource::TokenSource(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
TokenSource::TokenSource(TokenSource&&) noexcept = default;
TokenSource& TokenSource::operator=(TokenSource&&) noexcept = default;
TokenSource::~TokenSource() = default;

TokenSource TokenSource::open(const config::DataSection& data, std::uint64_t vocab_size) {
  auto parts = std::make_unique<Parts>();
  check_keys(data);
  parts->vocab_size = std::min<std::uint64_t>(vocab_size, std::uint64_t{1} << 31);
  const bool text = !data.text.empty();
  for (const auto& path : list_files(text ? data.text : data.tokens,
                                     text ? FolderFilter::text : FolderFilter::token_bin)) {
    parts->add(path, data);
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

void TokenSource::read(std::uint64_t first, std::span<std::int32_t> out) const {
  expects(first <= size() && out.size() <= size() - first,
          "tokens: the range reaches beyond the data");
  const auto& files = parts_->files;
  // The last file that starts at or before `first`; empty files before it start there too.
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

}  // namespace ballast::train
