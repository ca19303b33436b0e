#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace ballast {

using Bytes = std::uint64_t;
/// A number of tensor elements.
using Elems = std::uint64_t;

inline constexpr Bytes kKiB = 1024;
inline constexpr Bytes kMiB = 1024 * kKiB;
inline constexpr Bytes kGiB = 1024 * kMiB;
/// Alignment of O_DIRECT transfers and of every block's flat buffer.
inline constexpr Bytes kPage = 4096;
/// Alignment of tensors inside a flat buffer: one cache line.
inline constexpr Bytes kCacheLine = 64;

/// `value` rounded up to a multiple of `granule` (> 0).
constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t granule) {
  return (value + granule - 1) / granule * granule;
}

/// Describes the input of parse_bytes() in messages.
inline constexpr std::string_view kSizeForm =
    "a size (a number of bytes, or a number with B, kB, MB, GB, TB, KiB, MiB, GiB or TiB)";

/// Parses "512", "64KiB", "1.5 GiB", "10GB" (powers of 1000 without the i). Throws Error(config)
/// that quotes `text` if it is not a size, negative, or not below 2^63.
Bytes parse_bytes(std::string_view text);

/// Parses a count with an optional binary or decimal suffix: "1000", "256Mi", "2k". Throws
/// Error(config).
std::uint64_t parse_count(std::string_view text);

/// Describes the input of parse_seconds() in messages.
inline constexpr std::string_view kTimeForm = "a time (a number with s, m, h or d)";

/// Parses "45s", "30m", "1.5 h", "2 days" as seconds; also sec, min and the full words. Throws
/// Error(config) that quotes `text` if it is not a time, not above 0, or above 1000 days.
double parse_seconds(std::string_view text);

/// Formats bytes as "1.50 GiB": three significant digits, binary unit.
std::string format_bytes(Bytes bytes);

/// Formats a count as "124M" or "1.23B".
std::string format_count(double count);

/// Formats a rate as "414 GFLOP/s": three significant digits with a decimal prefix. `unit`: the
/// unit per second ("FLOP").
std::string format_rate(double per_second, std::string_view unit);

/// Formats seconds as "1h02m", "3m20s", "12.3s" or "45ms".
std::string format_seconds(double seconds);

/// The elements [first, end) of an array.
struct ElementRange {
  Elems first = 0;
  Elems end = 0;
  [[nodiscard]] Elems count() const { return end - first; }
};

// Host memory of a run in addition to its budgets, whose ledger lists all buffers of steps.

/// Program, libraries and one thread of the host device, without CUDA, as measured (resident).
inline constexpr Bytes kProgramMemory = 25 * kMiB;
/// More than that for a rank of several: the MPI library.
inline constexpr Bytes kMpiMemory = 8 * kMiB;
/// Buffers of files that are written behind, for checkpoints and saved weights.
inline constexpr Bytes kWriteBuffers = 64 * kMiB;

}  // namespace ballast
