#pragma once

#include <filesystem>
#include <string>

namespace ballast::formats {

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

}  // namespace ballast::formats
