#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ballast/data/sequences.h"
#include "ballast/data/tokens.h"

#include "src/formats/data_files.h"

namespace ballast::data {

/// A document, or a part of a document that is longer than a sequence.
struct Piece {
  std::uint64_t first = 0;  ///< its first token
  std::uint32_t length = 0;
  bool continues = false;  ///< whether the document continues after it
};

/// Cuts documents [offsets[i], offsets[i + 1]) into pieces of at most `length` tokens, in order.
/// Documents without tokens have no pieces.
std::vector<Piece> cut_documents(std::span<const std::uint64_t> offsets, std::uint64_t length);

/// Packs pieces into sequences by best-fit decreasing: longest first, each into the sequence with
/// the least sufficient free space (Ding et al., "Fewer Truncations Improve Language Modeling",
/// ICML 2024, section 3). A pure function of its arguments. Takes O(n log n) time and about 60
/// bytes per piece, of which 16 remain.
class Packing {
 public:
  /// Pieces have 1 to `length` tokens. With `seed`, pieces of equal length are taken in a random
  /// order, so that neighbours in the files do not share a sequence more often than others; without
  /// it, in order. Sequences are ordered by their first pieces, and pieces keep their order within
  /// a sequence.
  Packing(std::vector<Piece> pieces, std::uint64_t length, std::optional<std::uint64_t> seed);

  [[nodiscard]] std::uint64_t sequences() const { return starts_.size() - 1; }
  [[nodiscard]] std::span<const Piece> pieces(std::uint64_t sequence) const;
  /// Tokens of a sequence without padding.
  [[nodiscard]] std::uint64_t tokens(std::uint64_t sequence) const;

 private:
  std::vector<Piece> pieces_;          ///< sequence by sequence
  std::vector<std::uint64_t> starts_;  ///< first piece of each sequence, and the end of the last
};

/// Several files of documents as one list of documents, in the order given. Keeps the documents'
/// offsets in memory and reads tokens on request. Const members may be called from several threads.
///
/// A file is a safetensors file with the metadata `format` "ballast documents" and `version` "1",
/// and the tensors
///  - `tokens`, U16, U32 or I32 [T]: the ids of all documents, concatenated;
///  - `documents`, I64 or U64 [D + 1]: the first token of each document, and T;
///  - `mask`, U8 [T], optional: 1 for a token that is a target of training, else 0.
///
/// A file with the metadata `pairs` "chosen, rejected" has pairs: documents 2 i and 2 i + 1 are the
/// chosen and the rejected completion of the same prompt, which is masked.
class DocumentFiles {
 public:
  /// Opens the files of `patterns` (files, folders, globs; in a folder those that end in
  /// .safetensors) for a model with `vocab_size` token ids, and reads all tokens and masks once to
  /// check them. Throws Error(data) with the file and the tensor: not a file of documents; a dtype,
  /// shape, offset, id or mask that breaks the rules above; files of different tokenizers; no
  /// target at all, or none in one document of a pair. Throws Error(io). Logs a warning if
  /// documents have no targets. `pairs`: the files must have pairs, otherwise none may. `model`:
  /// the folder with the model's tokenizer, for advice. `table` as in TokenSource::open().
  static DocumentFiles open(std::span<const std::string> patterns, std::uint64_t vocab_size,
                            bool pairs = false, const std::filesystem::path& model = {},
                            const std::optional<TokenTable>& table = {});

  DocumentFiles(DocumentFiles&&) noexcept;
  DocumentFiles& operator=(DocumentFiles&&) noexcept;
  ~DocumentFiles();

  [[nodiscard]] std::vector<std::filesystem::path> files() const;
  /// First token of each document over all files, and the number of tokens.
  [[nodiscard]] std::span<const std::uint64_t> offsets() const;
  /// Number of tokens that are targets of training.
  [[nodiscard]] std::uint64_t targets() const;
  /// The tokenizer with which the files were made.
  [[nodiscard]] const formats::TokenizerIdentity& tokenizer() const;
  /// First and last document with a target.
  [[nodiscard]] std::uint64_t first_trained() const;
  [[nodiscard]] std::uint64_t last_trained() const;

  /// Reads tokens [first, first + tokens.size()), which must be in one document, and whether each
  /// is a target (0 or 1). Throws like open() for ids and masks.
  void read(std::uint64_t first, std::span<std::int32_t> tokens,
            std::span<std::uint8_t> trained) const;

 private:
  struct Parts;
  explicit DocumentFiles(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

/// Documents [first, end) of the files.
struct DocumentRange {
  std::uint64_t first = 0;
  std::uint64_t end = 0;
};

/// Number of training documents if the last documents, with at most the share `held_out` of all
/// tokens, are kept for evaluation.
std::uint64_t training_documents(std::span<const std::uint64_t> offsets, double held_out);

/// Packs the documents of `range` into sequences of `length` tokens (see Packing). With `shuffle`,
/// every epoch visits the sequences in another order, chosen by `seed`. The last token of a
/// document and masked tokens have no targets; at a cut, the next token is the target. Padding is
/// token 0 with ignored targets, in a separate document.
std::shared_ptr<const SequenceSource> packed(std::shared_ptr<const DocumentFiles> files,
                                             DocumentRange range, std::uint64_t length,
                                             bool shuffle, std::uint64_t seed);

/// Returns the pairs of `range` (even bounds) as sequences 2 i and 2 i + 1. Documents longer than
/// `length` tokens are cut at the end, and pairs whose prompt alone does not fit are skipped, both
/// like DPOTrainer of TRL with `length` as max_length and the truncation mode keep_start. With
/// `shuffle`, every epoch visits the pairs in another order, chosen by `seed`. `packed`: sequences
/// have positions, and padding is a separate document.
std::shared_ptr<const SequenceSource> paired(std::shared_ptr<const DocumentFiles> files,
                                             DocumentRange range, std::uint64_t length,
                                             bool shuffle, std::uint64_t seed, bool packed);

}  // namespace ballast::data
