#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/config/choices.h"
#include "ballast/core/memory.h"
#include "ballast/core/units.h"

namespace ballast::formats {

/// Selects files of a folder.
enum class FolderFilter {
  text,       ///< no NUL in the first 64 KiB
  token_bin,  ///< name ends in .bin; if there is none, in .npy
  documents,  ///< name ends in .safetensors
};

struct ListedFile {
  std::filesystem::path path;
  bool in_folder = false;  ///< found in a folder; otherwise named, or matched by a glob
};

/// Expands `patterns` (files, folders, globs) in order; see TokenSource::open. Throws Error(data).
std::vector<ListedFile> list_files(std::span<const std::string> patterns, FolderFilter filter);

/// Place of the tokens of a file: `count` little-endian ids of `width` bytes (1, 2, 4 or 8) from
/// byte `offset`.
struct TokenLayout {
  Bytes offset = 0;
  std::size_t width = 1;
  std::uint64_t count = 0;
  bool is_signed = false;
  bool stated = true;  ///< whether the file states its type; otherwise data.token_type or the
                       ///< vocabulary does
};

/// The layout of token ids in an open file of `size` bytes that begins like a NumPy array. Throws
/// Error(data) naming the file: a damaged header, a size that does not match it, more than one
/// dimension, a type other than little-endian integers. Source: numpy.lib.format.
TokenLayout numpy_layout(const std::filesystem::path& path, const Descriptor& file, Bytes size);

/// How the files of data.tokens are read.
struct TokenUse {
  config::TokenType token_type = config::TokenType::automatic;
  std::uint64_t vocab_size = 0;
  std::filesystem::path model;  ///< a folder with a tokenizer, for advice; "" if unknown
  bool as_is = false;           ///< data.as_is: read files of other formats as headerless tokens
};

/// The layout of an open token file, detected from its content:
///  - Megatron's `NAME.bin`, with the index `NAME.idx` next to it: its type and sizes are checked
///    against the file; ids are U8, U16 or I32.
///  - llm.c's: a header of 1 KiB with the number of tokens, which are u16 or u32.
///  - NumPy's `.npy`: an array of one dimension of little-endian integers.
///  - otherwise headerless tokens of `token_type` u16 or u32, or auto: u16 if `vocab_size` allows
///    it.
/// Throws Error(data) naming the file for an index or header that contradicts the file or
/// `token_type`, for a size that is not a multiple of the token, for ids that seem to have another
/// size, and, unless `as_is`, for a file of another format (see refuse_other_format()).
TokenLayout layout_of(const std::filesystem::path& path, const Descriptor& file,
                      const TokenUse& use);

/// A hint for an id of `file` outside the vocabulary: another type of its tokens, or
/// data for another model. `at`: its byte in the file.
std::string advice_for_id(const std::filesystem::path& path, const Descriptor& file,
                          const TokenLayout& layout, Bytes at, std::uint64_t vocab_size);

/// The tokenizer that made a file of documents, or that of a folder, as SHA-256 hashes ("":
/// unknown).
struct TokenizerIdentity {
  std::string name;  ///< name of its folder
  /// Hash of the serialised tokenizer. transformers changes some tokenizers while it loads them,
  /// each version differently, so two different hashes may belong to the same tokenizer.
  std::string serialised;
  /// Hash of the tokens of its model: a line "ID TAB TOKEN LF" per token, by ascending id, in
  /// UTF-8.
  std::string vocabulary;
  /// Hash of the added tokens in the same form.
  std::string added_tokens;
};

/// Difference between two tokenizers.
enum class TokenizerDifference {
  none,          ///< equal as far as the hashes show
  unclear,       ///< only the serialised tokenizers can be compared, and they differ
  added_tokens,  ///< equal vocabularies with different added tokens
  vocabulary,    ///< some ids have different tokens
};

/// Whether files of documents with these identities were made with different tokenizers.
bool differ(const TokenizerIdentity& a, const TokenizerIdentity& b);

TokenizerDifference compare(const TokenizerIdentity& a, const TokenizerIdentity& b);

/// The identity of the tokenizer.json in `folder`: all unknown without such a file, or if the
/// tokenizers library did not write it. Throws Error(data) if the file cannot be read.
TokenizerIdentity identify_tokenizer(const std::filesystem::path& folder);

/// The name of a file of `folder` that belongs to a tokenizer; "" if there is none.
std::string tokenizer_file_of(const std::filesystem::path& folder);

/// SHA-256 of `bytes` (FIPS 180-4) as 64 hexadecimal digits.
std::string sha256(std::string_view bytes);

}  // namespace ballast::formats
