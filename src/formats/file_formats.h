#pragma once

#include <cstdint>
#include <filesystem>

#include "ballast/core/descriptor.h"
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

}  // namespace ballast::formats
