#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "ballast/core/memory.h"
#include "ballast/core/units.h"

namespace ballast::formats {

/// A file format, detected from the content, independent of the file's name.
enum class FileFormat : std::uint8_t {
  unknown,  ///< for example headerless token ids
  // Data that Ballast reads.
  numpy,
  llmc,
  megatron_index,
  documents,  ///< a safetensors file of prepare.py
  pairs,      ///< a file of prepare.py with preference pairs
  // Text.
  text,
  utf16_text,
  json_lines,  ///< its first line is a JSON object with a key that prepare.py reads
  json_array,  ///< its first element is such an object
  json,        ///< another JSON object or array
  html,
  git_lfs,
  // Data and weights of other programs.
  safetensors,
  numpy_archive,
  litgpt,
  litdata,
  mosaic,
  tfrecord,
  fairseq_index,
  llmc_weights,  ///< a checkpoint or the tokenizer of llm.c
  gguf,
  torch,
  pickle,
  parquet,
  arrow,
  hdf5,
  sqlite,
  pdf,
  image,
  // Compressed files and archives.
  gzip,
  zstd,
  bzip2,
  xz,
  lz4,
  zip,
  seven_zip,
  rar,
  tar,
};

/// The format of an open file of `size` bytes. Reads its first 4 KiB, for some formats also its end
/// or its whole first line. A format whose signature is short enough to be token ids by chance must
/// also have a matching structure. Throws Error(io) if reading fails.
FileFormat recognise(const std::filesystem::path& path, const Descriptor& file, Bytes size);

/// recognise() for a path. Anything except a readable regular file is unknown.
FileFormat recognise(const std::filesystem::path& path);

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

enum class Settings { config, rates };

/// Describes a file that is not `wanted` and what to do with it: "chat.jsonl is JSON Lines, not a
/// config: ...". Returns "" if it looks like `wanted`, or like text or JSON of an unknown kind. For
/// the error of a reader that could not read it.
std::string explain_other_settings(const std::filesystem::path& path, Settings wanted);

/// One number of a step, with its name in monitors.
struct Scalar {
  std::string_view name;  ///< "Train/Samples/lr"
  double value = 0.0;
};

// Records of TensorBoard's event files. A record is a TFRecord: the length of the message (uint64),
// its masked CRC, the message, and the masked CRC of that, little-endian (TensorFlow,
// core/lib/io/record_writer.h). The message is a protocol buffer `Event` (TensorBoard,
// compat/proto/event.proto and summary.proto). `wall_time`: seconds since 1970.

/// The first record of a file: its version.
std::string event_file_head(double wall_time);

/// A record that makes readers discard earlier records of the folder for `step` and later steps,
/// since these steps follow. A run writes it first, also when it continues.
std::string event_session_start(double wall_time, std::int64_t step);

/// A record of all `scalars` of `step`. Readers have them as float.
std::string event_scalars(double wall_time, std::int64_t step, std::span<const Scalar> scalars);

/// CRC-32C (Castagnoli; RFC 3720, appendix B.4).
std::uint32_t crc32c(std::string_view bytes);

/// The CRC of data as TFRecord stores it, in 4 bytes: masked, since a CRC of data that contain CRCs
/// is weak.
std::string masked_crc(std::string_view bytes);

}  // namespace ballast::formats
