#include "src/formats/numpy_array.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

namespace ballast::formats {
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
