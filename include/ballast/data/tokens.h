#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ballast/config/config.h"
#include "ballast/text/output_file.h"

namespace ballast::data {

/// A matrix of the model of which a token reads one row, and the config key of its size.
struct TokenTable {
  std::string key = "model.vocab_size";
  std::uint64_t rows = 0;
};

/// Returns the matrix that limits token ids: `table` if it has fewer rows than the vocabulary, else
/// the embedding, with at most 2^31 rows.
inline TokenTable limit_of_ids(std::uint64_t vocab_size, const std::optional<TokenTable>& table) {
  if (table && table->rows < vocab_size) return *table;
  return {.rows = std::min<std::uint64_t>(vocab_size, std::uint64_t{1} << 31U)};
}

/// Reason of a refusal of an id that is below model.vocab_size.
inline constexpr const char* kNoRow =
    "the tables that the layers read have no row for it; leave such tokens out of the data";

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

/// Several files as one sequence of token ids, in the order given. Keeps only names and sizes in
/// memory and reads tokens on request. read() is thread-safe.
class TokenSource {
 public:
  /// Opens the files of `data` for a model with `vocab_size` token ids.
  ///  - `data.text`: one token per byte. A path may be a file, a folder or a glob. Folders are
  ///    walked recursively, without folders that start with '.' or "build", links to folders, and
  ///    files with a NUL in their first 64 KiB. Entries of folders and matches of globs are sorted
  ///    by the bytes of their names. Matches are treated like entries of a folder.
  ///  - `data.tokens`: token files of Megatron, llm.c or NumPy, or files with only tokens
  ///    (data.token_type), detected by content. Folders and globs as above, but folders contribute
  ///    only files that end in .bin or, if there are none, in .npy.
  /// A file listed twice counts twice. `model`: the folder with the model's tokenizer, for advice.
  /// `table`: another matrix that tokens index, with at least one row and perhaps fewer than
  /// `vocab_size`.
  /// Throws Error(data) if a file or folder cannot be read; if nothing matches; if a size, header
  /// or index does not fit the file or data.token_type; and, without data.as_is, for a file of
  /// another format that is listed or matched by a glob. Throws Error(config) unless exactly one of
  /// text and tokens is given, and for a token type other than auto, u16 and u32.
  static TokenSource open(const config::DataSection& data, std::uint64_t vocab_size,
                          const std::filesystem::path& model = {},
                          const std::optional<TokenTable>& table = {});

  TokenSource(TokenSource&&) noexcept;
  TokenSource& operator=(TokenSource&&) noexcept;
  ~TokenSource();

  [[nodiscard]] std::uint64_t size() const;
  [[nodiscard]] std::vector<std::filesystem::path> files() const;
  /// Returns the index of the first token of each file.
  [[nodiscard]] std::vector<std::uint64_t> starts() const;

  /// Copies token ids [first, first + out.size()) to `out`. Throws Error(data) if an id is not
  /// below vocab_size and the rows of the table, or a file's size has changed since open(),
  /// Error(io) if reading fails, Error(state) beyond size().
  void read(std::uint64_t first, std::span<std::int32_t> out) const;

 private:
  struct Parts;
  explicit TokenSource(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

/// Largest vocabulary of byte-level models: 256 and a few special tokens.
inline constexpr std::uint64_t kLargestByteVocabulary = 272;

/// Keeps the last `held_out` share (0 to 0.5) of `total` tokens for evaluation, rounded down to
/// whole tokens. A share of fewer than `length` + 1 tokens is used for training instead. Throws
/// Error(data) if the training part has fewer than `length` + 1 tokens.
TokenSplit split_tokens(std::uint64_t total, double held_out, std::uint64_t length);

/// Writes every token of `source` to `path` as 16-bit little-endian ids, atomically. `interrupted`
/// (may be null) stops it with Error(interrupted). Throws like text::OutputFile; Error(data) for an
/// id above 65,535.
void write_tokens(const TokenSource& source, const std::filesystem::path& path,
                  const text::OutputRule& rule, const std::atomic<bool>* interrupted = nullptr);

/// Summary of a run's training data.
struct DataSummary {
  std::uint64_t files = 0;
  std::uint64_t training_tokens = 0;
  std::uint64_t evaluation_tokens = 0;
  std::uint64_t documents = 0;  ///< training documents; 0 if the data have none
  std::uint64_t sequences = 0;  ///< sequences that they are packed into
  double padding = 0.0;         ///< share of padding in the tokens of these sequences
};

}  // namespace ballast::data
