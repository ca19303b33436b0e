#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "src/formats/file_formats.h"

namespace ballast::formats {

/// How a config names a file.
struct FileUse {
  std::string_view key;         ///< of the section data: text, tokens, documents or pairs
  std::filesystem::path model;  ///< a folder with the model's tokenizer for commands; "" if unknown
};

/// Throws Error(data) if a file of `format` is not what `use` says: what the file is, and the key
/// or the command with which it can be used. Accepts what the key reads, and an unknown format.
void refuse_other_format(const std::filesystem::path& path, FileFormat format, const FileUse& use);

/// The key of the section data that reads the format: text, tokens, documents or pairs; "" if none
/// does.
std::string_view reader_of(FileFormat format);

/// "a Parquet file", for "FILE is ...".
std::string_view describe(FileFormat format);

/// What to do with a file of another format than text and JSON, in a sentence without its end.
std::string advice_for(const std::filesystem::path& path, FileFormat format);

/// Says what a file that is not safetensors is, and what to do with it: "is text, not safetensors".
/// "" if its format is unknown or JSON that is not data.
std::string explain_not_safetensors(const std::filesystem::path& path);

/// The command that makes a file of documents, or of pairs, from `file`.
std::string preparing_command(const std::filesystem::path& file, const FileUse& use);

}  // namespace ballast::formats
