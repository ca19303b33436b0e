#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/formats/file_formats.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

#include "src/formats/data_files.h"

namespace ballast::formats {

namespace {

static_assert(std::endian::native == std::endian::little, "files are read without swapping bytes");

namespace fs = std::filesystem;

// Megatron's index: magic, u64 version, u8 type, u64 sequences, u64 entries of the document index,
// i32 lengths of the sequences, i64 byte offsets of them, i64 document index; multimodal ones add
// an i8 per sequence. Source: IndexedDataset of Megatron Core (megatron/core/datasets/readme.md).
constexpr std::string_view kIndexMagic("MMIDIDX\0\0", 9);
constexpr Bytes kIndexHeader = 34;
constexpr Bytes kPerSequence = 12;
constexpr std::uint64_t kSequencesAtATime = std::uint64_t{1} << 16;

// llm.c's header: 256 i32, of which the first three are magic, version and number of tokens.
// Source: dev/data/data_common.py of llm.c.
constexpr Bytes kLlmcHeader = 1024;
struct LlmcKind {
  std::uint32_t magic;
  std::uint32_t version;
  std::size_t width;
};
constexpr std::array<LlmcKind, 2> kLlmcKinds = {{{20240520, 1, 2}, {20240801, 7, 4}}};

[[noreturn]] void refuse(const fs::path& path, const std::string& what) {
  throw Error(ErrorCategory::data, fmt::format("{}: {}", path.string(), what));
}

/// Checks a file that says that a token has `width` bytes.
void check_type(const fs::path& path, std::string_view source, config::TokenType token_type,
                std::size_t width) {
  const std::string_view named = width == 2 ? "u16" : width == 4 ? "u32" : "u8";
  if (token_type == config::TokenType::automatic || config::name_of(token_type) == named) return;
  refuse(path, fmt::format("{} says that tokens have {} bytes, but data.token_type is {}: remove "
                           "data.token_type",
                           source, width, config::name_of(token_type)));
}

template <class T>
T value_at(std::span<const std::byte> bytes, std::size_t at) {
  T value;
  std::memcpy(&value, bytes.subspan(at).data(), sizeof(T));
  return value;
}

/// An open index.
struct Index {
  fs::path path;
  Descriptor file;
  std::uint64_t sequences = 0;
  std::size_t width = 0;

  [[nodiscard]] std::uint64_t tokens() const;
};

/// Reads the lengths and checks that the sequences follow each other without gaps.
std::uint64_t Index::tokens() const {
  std::uint64_t total = 0;
  std::vector<std::int32_t> lengths;
  std::vector<std::int64_t> offsets;
  for (std::uint64_t done = 0; done < sequences; done += lengths.size()) {
    lengths.resize(std::min(kSequencesAtATime, sequences - done));
    offsets.resize(lengths.size());
    text::read_fully(file, path, kIndexHeader + done * sizeof(std::int32_t),
                     std::as_writable_bytes(std::span(lengths)));
    text::read_fully(file, path,
                     kIndexHeader + sequences * sizeof(std::int32_t) + done * sizeof(std::int64_t),
                     std::as_writable_bytes(std::span(offsets)));
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      if (lengths[i] < 0 || static_cast<std::uint64_t>(offsets[i]) != total * width) {
        refuse(path, fmt::format("sequence {} has {} tokens from byte {} on, but the one before "
                                 "ends at byte {}: the index is damaged",
                                 done + i, lengths[i], offsets[i], total * width));
      }
      total += static_cast<std::uint64_t>(lengths[i]);
    }
  }
  return total;
}

/// Checks the header and the sizes that it gives against the size of the index.
void read_header(Index& index, Bytes size) {
  std::array<std::byte, kIndexHeader> header{};
  if (size < kIndexHeader) refuse(index.path, fmt::format("has {} bytes: it is truncated", size));
  text::read_fully(index.file, index.path, 0, header);
  const auto version = value_at<std::uint64_t>(header, 9);
  if (version != 1) refuse(index.path, fmt::format("has version {}, not 1", version));
  const auto code = value_at<std::uint8_t>(header, 17);
  // Megatron's codes of NumPy's types.
  index.width = code == 1 ? 1 : code == 8 ? 2 : code == 4 ? 4 : 0;
  if (index.width == 0) {
    refuse(index.path, fmt::format("has type code {}; tokens can be u8 (1), i32 (4) or u16 (8)",
                                   static_cast<unsigned>(code)));
  }
  index.sequences = value_at<std::uint64_t>(header, 18);
  const auto entries = value_at<std::uint64_t>(header, 26);
  const Bytes rest = size - kIndexHeader;
  const bool fits = index.sequences <= rest / kPerSequence &&
                    entries <= (rest - index.sequences * kPerSequence) / sizeof(std::int64_t);
  const Bytes used = fits ? index.sequences * kPerSequence + entries * sizeof(std::int64_t) : 0;
  if (!fits || (used != rest && used + index.sequences != rest)) {
    refuse(index.path, fmt::format("has {} bytes, which does not match its {} sequences and {} "
                                   "entries of the document index: it is truncated or damaged",
                                   size, index.sequences, entries));
  }
}

/// The layout from the index next to `path`, if there is one.
std::optional<TokenLayout> megatron_layout(const fs::path& path, Bytes size,
                                           config::TokenType token_type) {
  if (path.extension() != ".bin") return std::nullopt;
  Index index{.path = fs::path(path).replace_extension(".idx"), .file = {}};
  std::error_code ignored;
  if (!fs::exists(index.path, ignored)) return std::nullopt;
  index.file = text::open_file(index.path, O_RDONLY | O_NONBLOCK, ErrorCategory::data);
  const Bytes index_size = text::regular_file_size(index.file, index.path, ErrorCategory::data);
  std::array<char, kIndexMagic.size()> magic{};
  const auto start = std::span(magic).first(std::min<Bytes>(index_size, magic.size()));
  text::read_fully(index.file, index.path, 0, std::as_writable_bytes(start));
  if (std::string_view(magic.data(), magic.size()) != kIndexMagic) {
    refuse(index.path, fmt::format("is not an index of Megatron: move it away if {} has tokens "
                                   "alone",
                                   path.filename().string()));
  }
  read_header(index, index_size);
  const std::uint64_t tokens = index.tokens();
  if (size % index.width != 0 || size / index.width != tokens) {
    refuse(path, fmt::format("has {} bytes, but {} lists {} tokens of {} bytes", size,
                             index.path.filename().string(), tokens, index.width));
  }
  check_type(path, index.path.filename().string(), token_type, index.width);
  return TokenLayout{.offset = 0, .width = index.width, .count = tokens};
}

std::optional<TokenLayout> llmc_layout(const fs::path& path, Bytes size,
                                       std::span<const std::byte> start,
                                       config::TokenType token_type) {
  if (start.size() < 3 * sizeof(std::uint32_t)) return std::nullopt;
  const auto magic = value_at<std::uint32_t>(start, 0);
  const auto* const kind =
      std::find_if(kLlmcKinds.begin(), kLlmcKinds.end(),
                   [magic](const LlmcKind& known) { return known.magic == magic; });
  if (kind == kLlmcKinds.end()) return std::nullopt;
  const auto version = value_at<std::uint32_t>(start, 4);
  const auto count = value_at<std::uint32_t>(start, 8);
  if (version != kind->version) {
    refuse(path, fmt::format("has llm.c's magic {} and version {}; this program reads version {}",
                             magic, version, kind->version));
  }
  if (size != kLlmcHeader + count * kind->width) {
    refuse(path, fmt::format("has {} bytes, but its header lists {} tokens of {} bytes: it is "
                             "truncated or damaged",
                             size, count, kind->width));
  }
  check_type(path, "the header", token_type, kind->width);
  return TokenLayout{.offset = kLlmcHeader, .width = kind->width, .count = count};
}

/// Whether `bytes` are numbers of type Wide that half their size could represent (`limit`): read as
/// numbers of that size, every second one is 0.
template <class Wide>
bool looks_like(std::span<const std::byte> bytes, Wide limit) {
  constexpr std::size_t kFewest = 16;
  const std::size_t count = bytes.size() / sizeof(Wide);
  bool any = false;
  for (std::size_t i = 0; i < count; ++i) {
    const auto id = value_at<Wide>(bytes, i * sizeof(Wide));
    if (id >= limit) return false;
    any = any || id != 0;
  }
  return any && count >= kFewest;
}

/// Whether ids are below `vocab_size` and many differ where numbers of 32 bits would have their
/// upper half.
bool seem_to_have_16_bits(std::span<const std::byte> bytes, std::uint64_t vocab_size) {
  constexpr std::uint16_t kLargestUpperHalf = 7;  // for vocabularies below 2^19
  const std::size_t count = bytes.size() / sizeof(std::uint16_t);
  std::size_t large = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto id = value_at<std::uint16_t>(bytes, i * sizeof(std::uint16_t));
    if (id >= vocab_size) return false;
    large += i % 2 == 1 && id > kLargestUpperHalf ? 1 : 0;
  }
  return large * 8 > count;
}

constexpr std::string_view kConvert =
    "convert them with numpy: numpy.fromfile(FILE, 'int64').astype('uint32').tofile(OTHER)";

/// The layout of a headerless token file.
TokenLayout plain_layout(const fs::path& path, Bytes size, std::span<const std::byte> start,
                         const TokenUse& use) {
  constexpr std::uint64_t kU16Values = 65536;
  constexpr std::uint64_t kU32Values = std::uint64_t{1} << 32U;
  const bool automatic = use.token_type == config::TokenType::automatic;
  const std::size_t width =
      (automatic ? use.vocab_size <= kU16Values : use.token_type == config::TokenType::u16) ? 2 : 4;
  if (size % width != 0) {
    refuse(path, fmt::format("has {} bytes, which is not a multiple of the token size of {} bytes: "
                             "is it a token file, and is it whole? Check data.token_type",
                             size, width));
  }
  const bool checked = !use.as_is && (automatic || width == 4);
  if (checked && size % 8 == 0 && looks_like<std::uint64_t>(start, kU32Values)) {
    refuse(path, fmt::format("every second 32-bit number at its start is 0, so its tokens seem to "
                             "have 64 bits: {}, or set data.as_is to true",
                             kConvert));
  }
  if (checked && width == 2 && size % 4 == 0 && looks_like<std::uint32_t>(start, kU16Values)) {
    refuse(path,
           "every second 16-bit number at its start is 0, so its tokens seem to have 32 "
           "bits: set data.token_type to u32, or to u16 if they have 16");
  }
  return {.offset = 0, .width = width, .count = size / width, .stated = false};
}

}  // namespace

TokenLayout layout_of(const fs::path& path, const Descriptor& file, const TokenUse& use) {
  constexpr Bytes kProbed = 4096;
  const Bytes size = text::regular_file_size(file, path, ErrorCategory::data);
  if (const auto layout = megatron_layout(path, size, use.token_type)) return *layout;
  std::vector<std::byte> start(std::min(size, kProbed));
  text::read_fully(file, path, 0, start);
  const FileFormat format = recognise(path, file, size);
  if (format == FileFormat::numpy) {
    const TokenLayout layout = numpy_layout(path, file, size);
    check_type(path, "the header", use.token_type, layout.width);
    return layout;
  }
  if (const auto layout = llmc_layout(path, size, start, use.token_type)) return *layout;
  if (!use.as_is) refuse_other_format(path, format, {.key = "tokens", .model = use.model});
  return plain_layout(path, size, start, use);
}

std::string advice_for_id(const fs::path& path, const Descriptor& file, const TokenLayout& layout,
                          Bytes at, std::uint64_t vocab_size) {
  constexpr Bytes kProbed = 64 * kKiB;
  if (layout.stated) return "was the file made for another model?";
  const std::string unclear = "check data.token_type; or was the file made for another model?";
  if (layout.width != 4) return unclear;
  const Bytes size = text::regular_file_size(file, path, ErrorCategory::data);
  const Bytes begin = at - std::min(at, kProbed / 2);
  std::vector<std::byte> bytes(std::min(size - begin, kProbed));
  text::read_fully(file, path, begin, bytes);
  return seem_to_have_16_bits(bytes, vocab_size)
             ? "read with data.token_type u16 its ids are below that: set it"
             : unclear;
}

namespace {

// Format: magic of 6 bytes, u8 major and minor version, the length of the header (u16 in version 1,
// else u32), and the header: a dictionary of Python with descr, fortran_order and shape.
constexpr Bytes kVersionAt = 6;
constexpr Bytes kLengthAt = 8;
constexpr std::uint64_t kLongestArrayHeader = 65536;

struct ArrayRefusal {
  const std::filesystem::path& path;

  [[noreturn]] void operator()(const std::string& what) const {
    throw Error(ErrorCategory::data, fmt::format("{}: {}", path.string(), what));
  }
};

/// The text after "'key':" up to the end of the header.
std::string_view value_of(std::string_view header, std::string_view key,
                          const ArrayRefusal& refuse) {
  const std::string quoted = fmt::format("'{}':", key);
  const std::size_t at = header.find(quoted);
  const std::size_t value =
      at == std::string_view::npos ? at : header.find_first_not_of(' ', at + quoted.size());
  if (value == std::string_view::npos) {
    refuse(fmt::format("the header of the NumPy array has no '{}': it is damaged", key));
  }
  return header.substr(value);
}

/// The extents in "(600, 3)".
std::vector<std::uint64_t> shape_of(std::string_view text, const ArrayRefusal& refuse) {
  std::vector<std::uint64_t> shape;
  const std::size_t end = text.find(')');
  if (!text.starts_with('(') || end == std::string_view::npos) {
    refuse("the header of the NumPy array has no shape: it is damaged");
  }
  text = text.substr(1, end - 1);
  while (!text.empty()) {
    const std::size_t comma = std::min(text.find(','), text.size());
    std::string_view count = text.substr(0, comma);
    count.remove_prefix(std::min(count.find_first_not_of(' '), count.size()));
    if (!count.empty()) {
      std::uint64_t value = 0;
      const auto [stop, error] = std::from_chars(count.data(), count.data() + count.size(), value);
      if (error != std::errc() || stop != count.data() + count.size()) {
        refuse(fmt::format("the header of the NumPy array has the shape ({}): it is damaged",
                           text::printable(text)));
      }
      shape.push_back(value);
    }
    text.remove_prefix(std::min(comma + 1, text.size()));
  }
  return shape;
}

/// Width and sign of "<u2".
TokenLayout type_of(std::string_view text, const ArrayRefusal& refuse) {
  const std::size_t end = text.find('\'', 1);
  if (!text.starts_with('\'') || end == std::string_view::npos) {
    refuse("is a NumPy array of a structured type, not of token ids: save the ids alone");
  }
  const std::string_view type = text.substr(1, end - 1);
  const bool ordered = type.starts_with('<') || type.starts_with('|') || type.starts_with('=');
  constexpr std::array<std::string_view, 8> kIntegers = {"u1", "u2", "u4", "u8",
                                                         "i1", "i2", "i4", "i8"};
  const std::string_view kind = type.substr(std::min<std::size_t>(1, type.size()));
  if (std::find(kIntegers.begin(), kIntegers.end(), kind) == kIntegers.end()) {
    refuse(
        fmt::format("is a NumPy array of type {}, but token ids are integers: save it with "
                    "numpy.save(FILE, array.astype('uint32'))",
                    text::printable(type)));
  }
  if (!ordered) {
    refuse(
        fmt::format("is a NumPy array of type {}, which is big-endian: save it with "
                    "numpy.save(FILE, array.astype('<{}'))",
                    text::printable(type), kind));
  }
  return {.width = static_cast<std::size_t>(kind[1] - '0'), .is_signed = kind[0] == 'i'};
}

std::string read_header(const std::filesystem::path& path, const Descriptor& file, Bytes size,
                        Bytes& end, const ArrayRefusal& refuse) {
  std::array<std::byte, 12> head{};
  text::read_fully(file, path, 0, std::span(head).first(std::min<Bytes>(size, head.size())));
  const auto version = std::to_integer<unsigned>(head[kVersionAt]);
  if (version < 1 || version > 3) {
    refuse(fmt::format("is a NumPy array of version {}; this program reads 1 to 3", version));
  }
  std::uint32_t length = 0;
  const Bytes width = version == 1 ? 2 : 4;
  std::memcpy(&length, &head[kLengthAt], width);
  end = kLengthAt + width + length;
  if (length > kLongestArrayHeader || end > size) {
    refuse(
        fmt::format("is a NumPy array of {} bytes with a header of {}: it is truncated or damaged",
                    size, length));
  }
  std::string header(length, '\0');
  text::read_fully(file, path, kLengthAt + width, std::as_writable_bytes(std::span(header)));
  return header;
}

}  // namespace

TokenLayout numpy_layout(const std::filesystem::path& path, const Descriptor& file, Bytes size) {
  const ArrayRefusal refuse{path};
  Bytes begin = 0;
  const std::string header = read_header(path, file, size, begin, refuse);
  TokenLayout layout = type_of(value_of(header, "descr", refuse), refuse);
  const auto shape = shape_of(value_of(header, "shape", refuse), refuse);
  if (shape.size() != 1) {
    refuse(
        fmt::format("is a NumPy array of {} dimensions, but token ids are one list: save it with "
                    "numpy.save(FILE, array.reshape(-1))",
                    shape.size()));
  }
  layout.offset = begin;
  layout.count = shape[0];
  if ((size - begin) % layout.width != 0 || (size - begin) / layout.width != layout.count) {
    refuse(
        fmt::format("is a NumPy array of {} numbers of {} bytes, but has {} bytes behind its "
                    "header: it is truncated or damaged",
                    layout.count, layout.width, size - begin));
  }
  return layout;
}

}  // namespace ballast::formats
