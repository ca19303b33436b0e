#include "ballast/formats/file_formats.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <fcntl.h>

#include "ballast/core/error.h"
#include "ballast/formats/safetensors_header.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

namespace ballast::formats {

namespace {

using namespace std::string_view_literals;

constexpr Bytes kStart = 4096;
constexpr Bytes kLongestLine = kMiB;
constexpr std::size_t kFewestLetters = 16;  // shorter files can be ids by chance

struct Signature {
  std::string_view bytes;
  FileFormat format;
};

// Signatures long enough that token ids do not begin with them by chance. Sources: the
// specifications of the formats.
constexpr std::array kSignatures = {
    Signature{"\x93NUMPY"sv, FileFormat::numpy},
    Signature{"MMIDIDX\0\0"sv, FileFormat::megatron_index},
    Signature{"TNTIDX\0\0"sv, FileFormat::fairseq_index},
    Signature{"LITPKDS"sv, FileFormat::litgpt},
    Signature{"version https://git-lfs.github.com/spec/"sv, FileFormat::git_lfs},
    Signature{"ARROW1\0\0"sv, FileFormat::arrow},
    Signature{"\x89HDF\r\n\x1a\n"sv, FileFormat::hdf5},
    Signature{"SQLite format 3\0"sv, FileFormat::sqlite},
    Signature{"%PDF-"sv, FileFormat::pdf},
    Signature{"\x89PNG\r\n\x1a\n"sv, FileFormat::image},
    Signature{"\xfd"
              "7zXZ\0"sv,
              FileFormat::xz},
    Signature{"7z\xbc\xaf\x27\x1c"sv, FileFormat::seven_zip},
    Signature{"Rar!\x1a\x07"sv, FileFormat::rar},
    // The format of torch.save before it used archives: a pickle that begins with its own number.
    Signature{"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"sv, FileFormat::torch},
};

/// A file and its first bytes.
struct Probe {
  const std::filesystem::path& path;
  const Descriptor& file;
  Bytes size;
  std::string start;

  [[nodiscard]] std::string read(Bytes offset, Bytes count) const {
    std::string bytes(offset < size ? std::min(count, size - offset) : 0, '\0');
    text::read_fully(file, path, offset, std::as_writable_bytes(std::span(bytes)));
    return bytes;
  }
  [[nodiscard]] bool begins(std::string_view bytes) const { return start.starts_with(bytes); }
  /// The little-endian number at byte `at` of the start; 0 beyond it.
  template <class Number>
  [[nodiscard]] Number number(std::size_t at) const {
    Number value = 0;
    if (at <= start.size() && start.size() - at >= sizeof(value)) {
      std::memcpy(&value, start.data() + at, sizeof(value));
    }
    return value;
  }
};

bool ends_with(const Probe& probe, std::string_view bytes) {
  return probe.size >= bytes.size() && probe.read(probe.size - bytes.size(), bytes.size()) == bytes;
}

bool is_gguf(const Probe& probe) {
  constexpr std::uint32_t kVersions = 16;
  const auto version = probe.number<std::uint32_t>(4);
  // The three older formats have their letters in reverse order.
  const bool old = probe.begins("lmgg") || probe.begins("fmgg") || probe.begins("tjgg");
  return (probe.begins("GGUF") || old) && version <= kVersions;
}

/// Whether a JSON header follows its length.
bool is_safetensors(const Probe& probe) {
  const auto length = probe.number<std::uint64_t>(0);
  if (length < 2 || length > kLongestHeader || probe.start.size() < 10) return false;
  return probe.start[8] == '{' &&
         std::string_view("\"} \n").find(probe.start[9]) != std::string_view::npos;
}

FileFormat kind_of_safetensors(const Probe& probe) {
  try {
    const auto text = config::read_header_text(probe.file, probe.path, probe.size).json;
    if (!text) return FileFormat::safetensors;
    const Bytes data = probe.size - kLengthBytes - text->size();
    const SafetensorsHeader header = parse_header(*text, data, probe.path.string());
    const auto has = [&](const std::string& key, std::string_view value) {
      const auto found = header.metadata.find(key);
      return found != header.metadata.end() && (value.empty() || found->second == value);
    };
    if (has("format", "ballast documents")) {
      return has("pairs", "") ? FileFormat::pairs : FileFormat::documents;
    }
  } catch (const Error&) {
    // The reader of the key reports damage.
  }
  return FileFormat::safetensors;
}

/// Recognises shards of LitData and of MosaicML: a number of samples, an offset for each and for
/// the end, and, for MosaicML, a description in JSON.
FileFormat kind_of_shard(const Probe& probe) {
  const Bytes samples = probe.number<std::uint32_t>(0);
  const Bytes table = sizeof(std::uint32_t) * (samples + 2);
  if (samples == 0 || table > probe.size) return FileFormat::unknown;
  const Bytes first = probe.number<std::uint32_t>(4);
  const std::string last = probe.read(table - sizeof(std::uint32_t), sizeof(std::uint32_t) + 1);
  std::uint32_t end = 0;
  if (last.size() >= sizeof(end)) std::memcpy(&end, last.data(), sizeof(end));
  if (end != probe.size || first < table || first > end) return FileFormat::unknown;
  if (first == table) return FileFormat::litdata;
  return last.back() == '{' ? FileFormat::mosaic : FileFormat::unknown;
}

bool is_tfrecord(const Probe& probe) {
  constexpr std::size_t kLength = 8;
  if (probe.start.size() < kLength + 4) return false;
  const auto length = probe.number<std::uint64_t>(0);
  return length > 0 && length < probe.size &&
         probe.start.substr(kLength, 4) == masked_crc(probe.start.substr(0, kLength));
}

/// Recognises an Arrow stream: a mark, the length of the schema and the offset of its root table.
bool is_arrow_stream(const Probe& probe) {
  const auto length = probe.number<std::uint32_t>(4);
  const auto root = probe.number<std::uint32_t>(8);
  return probe.begins("\xff\xff\xff\xff") && length >= 16 && length % 8 == 0 &&
         length < probe.size && root >= 4 && root < length && root < 256;
}

/// Recognises a pickle of protocol 2 to 5, which ends with a dot.
bool is_pickle(const Probe& probe) {
  if (probe.start.size() < 8 || probe.start[0] != '\x80' || !ends_with(probe, ".")) return false;
  const char protocol = probe.start[1];
  const char next = probe.start[2];
  if (protocol == 4 || protocol == 5) {
    return next == '\x95' && probe.number<std::uint64_t>(3) < probe.size;
  }
  return (protocol == 2 || protocol == 3) &&
         std::string_view("]}()c").find(next) != std::string_view::npos;
}

/// The name of the first file of the archive identifies the kind of archive.
FileFormat kind_of_zip(const Probe& probe) {
  constexpr std::size_t kName = 30;
  const auto length = probe.number<std::uint16_t>(26);
  const auto method = probe.number<std::uint16_t>(8);
  if (method > 99 || length == 0 || probe.start.size() < kName + length) return FileFormat::unknown;
  const std::string name = probe.start.substr(kName, length);
  if (name.ends_with(".npy")) return FileFormat::numpy_archive;
  const bool of_torch = name.ends_with("data.pkl") || name.ends_with("/.format_version") ||
                        name.ends_with("/byteorder");
  return of_torch ? FileFormat::torch : FileFormat::zip;
}

FileFormat kind_of_compression(const Probe& probe) {
  const auto byte = [&](std::size_t at) { return static_cast<unsigned char>(probe.start[at]); };
  if (probe.start.size() < 12) return FileFormat::unknown;
  // Deflate is its only method. Three flags are reserved, and few values describe the effort of the
  // compression and the operating system (RFC 1952).
  const bool of_gzip = byte(3) < 0x20 && (byte(8) == 0 || byte(8) == 2 || byte(8) == 4) &&
                       (byte(9) <= 13 || byte(9) == 255);
  if (probe.begins("\x1f\x8b\x08") && of_gzip) return FileFormat::gzip;
  if (probe.begins("\x28\xb5\x2f\xfd") && (byte(4) & 0x08U) == 0) return FileFormat::zstd;
  if (probe.begins("BZh") && probe.start.substr(4, 6) == "1AY&SY") return FileFormat::bzip2;
  if (probe.begins("\x04\x22\x4d\x18") && (byte(4) >> 6U) == 1) return FileFormat::lz4;
  if (probe.begins("PK\x03\x04")) return kind_of_zip(probe);
  constexpr std::size_t kMagicOfTar = 257;
  if (probe.start.size() > kMagicOfTar + 5 && probe.start.substr(kMagicOfTar, 5) == "ustar") {
    return FileFormat::tar;
  }
  return FileFormat::unknown;
}

bool is_control(char c) {
  const auto byte = static_cast<unsigned char>(c);
  return (byte < 0x20 && (byte < '\t' || byte > '\r') && byte != 0x1b) || byte == 0x7f;
}

/// Whether it has letters without control characters: UTF-8, or mostly ASCII in another encoding.
bool is_text(const Probe& probe) {
  constexpr std::size_t kFewestOfOtherEncodings = 64;
  const std::string_view start = probe.start;
  if (start.size() < kFewestLetters || std::any_of(start.begin(), start.end(), is_control)) {
    return false;
  }
  const std::size_t bad = text::find_not_utf8(start);
  const bool cut = probe.size > start.size() && start.size() - std::min(bad, start.size()) < 4;
  if (bad == std::string_view::npos || cut) return true;
  const auto ascii = static_cast<std::size_t>(
      std::count_if(start.begin(), start.end(), [](char c) { return c >= 0; }));
  return start.size() >= kFewestOfOtherEncodings && ascii * 20 >= start.size() * 17;
}

/// Whether it has letters of two bytes with a byte order mark. As ids, they are small numbers.
bool is_utf16(const Probe& probe) {
  const std::size_t pairs = probe.start.size() / 2;
  const bool little = probe.begins("\xff\xfe");
  if (pairs < kFewestLetters || (!little && !probe.begins("\xfe\xff"))) return false;
  std::size_t letters = 0;
  for (std::size_t i = 1; i < pairs; ++i) {
    const char high = probe.start[2 * i + (little ? 1 : 0)];
    const char low = probe.start[2 * i + (little ? 0 : 1)];
    letters += high == 0 && low > 0 && !is_control(low) ? 1 : 0;
  }
  return letters * 4 > pairs * 3;
}

std::string_view after_space(std::string_view text) {
  if (text.starts_with("\xef\xbb\xbf")) text.remove_prefix(3);
  const std::size_t at = text.find_first_not_of(" \t\r\n");
  return at == std::string_view::npos ? "" : text.substr(at);
}

/// Whether JSON has a key that prepare.py reads.
bool has_key_of_documents(std::string_view json) {
  constexpr std::array kKeys = {"messages", "conversations", "prompt", "completion",
                                "chosen",   "rejected",      "text",   "instruction",
                                "question", "content"};
  return std::any_of(kKeys.begin(), kKeys.end(), [json](std::string_view key) {
    const std::string quoted = '"' + std::string(key) + '"';
    const std::size_t at = json.find(quoted);
    return at != std::string_view::npos &&
           after_space(json.substr(at + quoted.size())).starts_with(':');
  });
}

/// `start` begins with a brace or a bracket.
FileFormat kind_of_json(const Probe& probe, std::string_view start) {
  const std::string_view inside = after_space(start.substr(1));
  if (start.starts_with('[')) {
    if (inside.starts_with('{') && has_key_of_documents(inside)) return FileFormat::json_array;
    const bool json = !inside.empty() && std::string_view("{[]\"0123456789-").find(inside[0]) !=
                                             std::string_view::npos;
    return json ? FileFormat::json : FileFormat::text;
  }
  if (!inside.starts_with('"') && !inside.starts_with('}')) return FileFormat::text;
  const std::string lines = probe.read(0, kLongestLine);
  std::string_view line = after_space(lines);
  line = line.substr(0, line.find('\n'));
  const bool cut = line.size() == lines.size() && probe.size > kLongestLine;
  const bool of_documents = has_key_of_documents(line) && (cut || text::is_json(line));
  return of_documents ? FileFormat::json_lines : FileFormat::json;
}

FileFormat kind_of_text(const Probe& probe) {
  const std::string_view start = after_space(probe.start);
  if (start.starts_with('{') || start.starts_with('[')) return kind_of_json(probe, start);
  std::string head(start.substr(0, 14));
  std::transform(head.begin(), head.end(), head.begin(), [](unsigned char c) {
    return static_cast<char>(c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : c);
  });
  if (head.starts_with("<!doctype html") || head.starts_with("<html")) return FileFormat::html;
  return FileFormat::text;
}

}  // namespace

FileFormat recognise(const std::filesystem::path& path, const Descriptor& file, Bytes size) {
  Probe probe{.path = path, .file = file, .size = size, .start = {}};
  probe.start = probe.read(0, kStart);
  for (const Signature& signature : kSignatures) {
    if (probe.begins(signature.bytes)) return signature.format;
  }
  const auto magic = probe.number<std::uint32_t>(0);
  if (magic == 20240520 || magic == 20240801) return FileFormat::llmc;
  if (magic >= 20240326 && magic <= 20240328) return FileFormat::llmc_weights;
  if (is_gguf(probe)) return FileFormat::gguf;
  if (is_safetensors(probe)) return kind_of_safetensors(probe);
  if (probe.begins("PAR1") && ends_with(probe, "PAR1")) return FileFormat::parquet;
  if (const auto kind = kind_of_compression(probe); kind != FileFormat::unknown) return kind;
  if (probe.begins("\xff\xd8\xff") && ends_with(probe, "\xff\xd9")) return FileFormat::image;
  if (is_arrow_stream(probe)) return FileFormat::arrow;
  if (is_pickle(probe)) return FileFormat::pickle;
  if (is_tfrecord(probe)) return FileFormat::tfrecord;
  if (is_text(probe)) return kind_of_text(probe);
  if (is_utf16(probe)) return FileFormat::utf16_text;
  return kind_of_shard(probe);
}

FileFormat recognise(const std::filesystem::path& path) {
  try {
    const Descriptor file = text::open_file(path, O_RDONLY | O_NONBLOCK, ErrorCategory::data);
    return recognise(path, file, text::regular_file_size(file, path, ErrorCategory::data));
  } catch (const Error&) {
    return FileFormat::unknown;
  }
}

namespace {

constexpr std::array<std::uint32_t, 256> crc_table() {
  constexpr std::uint32_t kPolynomial = 0x82F63B78;  // bits in reverse order
  std::array<std::uint32_t, 256> table = {};
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    std::uint32_t rest = i;
    for (int bit = 0; bit < 8; ++bit) rest = (rest >> 1U) ^ ((rest & 1U) != 0 ? kPolynomial : 0);
    table[i] = rest;
  }
  return table;
}

template <class Number>
std::string little_endian(Number number) {
  std::string bytes;
  for (std::size_t i = 0; i < sizeof(number); ++i) {
    bytes += static_cast<char>((number >> (8 * i)) & 0xFFU);
  }
  return bytes;
}

std::string record(const std::string& message) {
  const std::string length = little_endian(std::uint64_t{message.size()});
  return length + masked_crc(length) + message + masked_crc(message);
}

// Fields of protocol buffers (protobuf.dev/programming-guides/encoding).
enum class Wire : std::uint8_t { varint = 0, fixed64 = 1, bytes = 2, fixed32 = 5 };

std::string varint(std::uint64_t number) {
  std::string text;
  for (; number >= 0x80; number >>= 7U) text += static_cast<char>((number & 0x7FU) | 0x80U);
  return text + static_cast<char>(number);
}

std::string field(unsigned number, Wire wire, const std::string& content) {
  return varint((number << 3U) | static_cast<unsigned>(wire)) + content;
}

std::string field(unsigned number, std::string_view bytes) {
  return field(number, Wire::bytes, varint(bytes.size()) + std::string(bytes));
}

/// Event.wall_time and Event.step. A step of 0 is omitted, like every default value.
std::string event(double wall_time, std::int64_t step) {
  std::string text =
      field(1, Wire::fixed64, little_endian(std::bit_cast<std::uint64_t>(wall_time)));
  if (step != 0) text += field(2, Wire::varint, varint(static_cast<std::uint64_t>(step)));
  return text;
}

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
  static constexpr auto kTable = crc_table();
  std::uint32_t crc = 0xFFFFFFFF;
  for (const char byte : bytes) {
    crc = kTable[(crc ^ static_cast<unsigned char>(byte)) & 0xFFU] ^ (crc >> 8U);
  }
  return ~crc;
}

std::string masked_crc(std::string_view bytes) {
  constexpr std::uint32_t kMask = 0xA282EAD8;
  return little_endian(std::rotr(crc32c(bytes), 15) + kMask);
}

std::string event_file_head(double wall_time) {
  return record(event(wall_time, 0) + field(3, "brain.Event:2"));
}

std::string event_session_start(double wall_time, std::int64_t step) {
  const std::string start = field(1, Wire::varint, varint(1));  // SessionLog.status: START
  return record(event(wall_time, step) + field(7, start));
}

std::string event_scalars(double wall_time, std::int64_t step, std::span<const Scalar> scalars) {
  std::string summary;
  for (const Scalar& scalar : scalars) {
    const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(scalar.value));
    summary += field(1, field(1, scalar.name) + field(2, Wire::fixed32, little_endian(bits)));
  }
  return record(event(wall_time, step) + field(5, summary));
}

}  // namespace ballast::formats
