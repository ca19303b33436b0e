#include "src/formats/event_file.h"

#include <array>
#include <bit>

namespace ballast::formats {
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
