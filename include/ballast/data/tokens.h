#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ballast/config/config.h"

namespace ballast::data {

/// Token ids [first, first + size) of a TokenSource.
struct TokenRange {
  std::uint64_t first = 0;
  std::uint64_t size = 0;
};

/// Tokens for training and for evaluation.
struct TokenSplit {
  TokenRange training;
  TokenRange held_out;  ///< may be empty
};

/// Several files as one sequence of token ids, in the listed order. Keeps only names and sizes in
/// memory and reads tokens on request. read() is thread-safe.
class TokenSource {
 public:
  /// Opens the files of `data` for a model with `vocab_size` token ids.
  ///  - `data.text`: one token per byte. A path may be a file, a folder (walked recursively;
  ///    entries sorted by the bytes of their names; without folders that start with '.' or "build",
  ///    links to folders, and files with a NUL in their first 64 KiB) or a glob (its matches sorted
  ///    likewise, each treated as a folder's entry).
  ///  - `data.tokens`: token files of Megatron, of llm.c, of NumPy, or with tokens alone
  ///    (data.token_type), detected by content; folders and globs as above, but of a folder only
  ///    files that end in .bin, or .npy if there are none.
  /// A file listed twice counts twice. `model`: the folder with the model's tokenizer, for advice.
  /// Throws Error(data): a file or folder that cannot be read, nothing matches, a size, header
  /// or index that does not fit the file or data.token_type, and, without data.as_is, a file of
  /// another format that is named or matched by a glob; Error(config): not exactly one of text
  /// and tokens, or a token type other than auto, u16 and u32.
  static TokenSource open(const config::DataSection& data, std::uint64_t vocab_size,
                          const std::filesystem::path& model = {});

  TokenSource(TokenSource&&) noexcept;
  TokenSource& operator=(TokenSource&&) noexcept;
  ~TokenSource();

  [[nodiscard]] std::uint64_t size() const;
  [[nodiscard]] std::vector<std::filesystem::path> files() const;
  /// Index of the first token of each file.
  [[nodiscard]] std::vector<std::uint64_t> starts() const;

  /// Copies token ids [first, first + out.size()) to `out`. Throws Error(data) if an id is not
  /// below vocab_size or a file's size has changed since open(), Error(io) if reading fails,
  /// Error(state) beyond size().
  void read(std::uint64_t first, std::span<std::int32_t> out) const;

 private:
  struct Parts;
  explicit TokenSource(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

/// Largest vocabulary of models that read bytes: 256 and a few special tokens.
inline constexpr std::uint64_t kLargestByteVocabulary = 272;

/// Keeps the last `held_out` share (0 to 0.5) of `total` tokens for evaluation, rounded down to
/// whole tokens; a share of fewer than `length` + 1 tokens goes to training instead. Throws
/// Error(data) if the training part has fewer than `length` + 1 tokens.
TokenSplit split_tokens(std::uint64_t total, double held_out, std::uint64_t length);

}  // namespace ballast::data
