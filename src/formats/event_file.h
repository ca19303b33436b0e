#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace ballast::formats {

/// One number of a step, with its name in monitors.
struct Scalar {
  std::string_view name;  ///< "Train/Samples/lr"
  double value = 0.0;
};

// Records of TensorBoard's event files. A record is a TFRecord: the length of the message (uint64),
// its masked CRC, the message, and the masked CRC of that, little-endian (TensorFlow,
// core/lib/io/record_writer.h). The message is a protocol buffer `Event` (TensorBoard,
// compat/proto/event.proto and summary.proto). `wall_time`: seconds since 1970.

/// The first record of a file: its version.
std::string event_file_head(double wall_time);

/// A record that makes readers discard earlier records of the folder for `step` and later steps,
/// since these steps follow. A run writes it first, also when it continues.
std::string event_session_start(double wall_time, std::int64_t step);

/// A record of all `scalars` of `step`. Readers have them as float.
std::string event_scalars(double wall_time, std::int64_t step, std::span<const Scalar> scalars);

/// CRC-32C (Castagnoli; RFC 3720, appendix B.4).
std::uint32_t crc32c(std::string_view bytes);

/// The CRC of data as TFRecord stores it, in 4 bytes: masked, since a CRC of data that contain CRCs
/// is weak.
std::string masked_crc(std::string_view bytes);

}  // namespace ballast::formats
