#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ballast/config/config.h"

namespace ballast::train {

/// How a token id is stored: `u8` is text read byte by byte, u16 and u32 are little-endian.
enum class TokenType : std::uint8_t { u8 = 1, u16 = 2, u32 = 4 };

/// Token ids [first, first + size) of a TokenSource.
struct TokenRange {
  std::uint64_t first = 0;
  std::uint64_t size = 0;
};

/// Which tokens are trained on and which are kept for evaluation.
struct TokenSplit {
  TokenRange training;
  TokenRange held_out;  ///< may be empty
};

/// Several files as one sequence of token ids, in the order in which they are listed. Files are
/// read when tokens are asked for; nothing but their names and sizes is kept in memory. read() may
/// be called from several threads at a time.
class TokenSource {
 public:
  /// What `data` names, for a model with `vocab_size` token ids. Paths are used as they stand.
  ///  - `data.text`: one token per byte. A path may be a file (taken as it is), a folder (walked
  ///    recursively; entries sorted by the bytes of their names; folders that start with '.' or
  ///    "build", links to folders, and files with a NUL among their first 64 KiB are left out) or a
  ///    glob (its matches sorted likewise, each treated as a folder's entry).
  ///  - `data.tokens`: files of data.token_type; folders and globs as above, except that a folder
  ///    stands for its files that end in .bin and that NUL means nothing.
  /// A file listed twice counts twice.
  /// Throws Error(data): a file or folder that cannot be read, nothing matches, a size that is no
  /// multiple of the token's; Error(config): not exactly one of text and tokens, or a token type
  /// other than u16 and u32.
  static TokenSource open(const config::DataSection& data, std::uint64_t vocab_size);

  TokenSource(TokenSource&&) noexcept;
  TokenSource& operator=(TokenSource&&) noexcept;
  ~TokenSource();

  /// Number of tokens in all files together.
  [[nodiscard]] std::uint64_t size() const;
  /// The files in order.
  [[nodiscard]] std::vector<std::filesystem::path> files() const;

  /// Copies token ids [first, first + out.size()) to `out`. Throws Error(data) naming file, byte
  /// offset, id and vocabulary when an id is not below vocab_size, or when a file's size has
  /// changed since open(); Error(io) when reading fails; Error(state) beyond size().
  void read(std::uint64_t first, std::span<std::int32_t> out) const;

 private:
  struct Parts;
  explicit TokenSource(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

/// Keeps the last `held_out` share (0 to 0.5) of `total` tokens for evaluation, rounded down to
/// whole tokens; a share too small for one sequence of `length` tokens (plus the last one's target)
/// is given to training instead. Throws Error(data) with both numbers when the training part is
/// shorter than one sequence plus 1.
TokenSplit split_tokens(std::uint64_t total, double held_out, std::uint64_t length);

}  // namespace ballast::train
