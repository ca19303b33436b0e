#pragma once

#include <filesystem>
#include <string>

namespace ballast::formats {

/// The tokenizer that made a file of documents, or that of a folder, as hashes of SHA-256 ("":
/// unknown).
struct TokenizerIdentity {
  std::string name;  ///< of its folder
  /// The serialised tokenizer. transformers changes some tokenizers while it loads them, each
  /// version its own way, so two different hashes may belong to the same tokenizer.
  std::string serialised;
  /// The tokens of its model: a line "ID TAB TOKEN LF" for each, by ascending id, in UTF-8.
  std::string vocabulary;
  /// The added tokens in the same form.
  std::string added_tokens;
};

/// How two tokenizers differ.
enum class TokenizerDifference {
  none,          ///< the same, as far as the hashes say
  unclear,       ///< only the serialised tokenizers can be compared, and they differ
  added_tokens,  ///< the same vocabulary with other added tokens
  vocabulary,    ///< the same ids stand for other tokens
};

/// Whether files of documents that say so were made with different tokenizers.
bool differ(const TokenizerIdentity& a, const TokenizerIdentity& b);

TokenizerDifference compare(const TokenizerIdentity& a, const TokenizerIdentity& b);

/// The identity of the tokenizer.json in `folder`: all unknown without such a file, or if it is not
/// what the tokenizers library writes. Throws Error(data) if the file cannot be read.
TokenizerIdentity identify_tokenizer(const std::filesystem::path& folder);

/// The name of a file of `folder` that belongs to a tokenizer; "" if there is none.
std::string tokenizer_file_of(const std::filesystem::path& folder);

}  // namespace ballast::formats
