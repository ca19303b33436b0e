#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "src/formats/file_formats.h"

namespace ballast::formats {

/// Use of a file in a config.
struct FileUse {
  std::string_view key;         ///< key of the section data: text, tokens, documents or pairs
  std::filesystem::path model;  ///< a folder with the model's tokenizer for commands; "" if unknown
};

/// Throws Error(data) if a file of `format` does not fit `use`. The message has the format, and the
/// key or the command that can use the file. Accepts formats that the key reads, and an unknown
/// format.
void refuse_other_format(const std::filesystem::path& path, FileFormat format, const FileUse& use);

/// The key of the section data that reads the format: text, tokens, documents or pairs; "" if there
/// is none.
std::string_view reader_of(FileFormat format);

/// "a Parquet file", for "FILE is ...".
std::string_view describe(FileFormat format);

/// Advice for a file of a format other than text and JSON, as a sentence without its end.
std::string advice_for(const std::filesystem::path& path, FileFormat format);

/// Describes a file that is not safetensors, with advice: "is text, not safetensors". "" if its
/// format is unknown or JSON that is not data.
std::string explain_not_safetensors(const std::filesystem::path& path);

/// The command that makes a file of documents, or of pairs, from `file`.
std::string preparing_command(const std::filesystem::path& file, const FileUse& use);

}  // namespace ballast::formats
