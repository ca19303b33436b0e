#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ballast/core/dtype.h"
#include "ballast/core/memory.h"
#include "ballast/core/units.h"
#include "ballast/formats/safetensors_header.h"

namespace ballast::formats {

// The file format: an 8-byte little-endian length, that number of bytes of JSON (name: {dtype,
// shape, data_offsets}), then the tensors' data, row-major, little-endian, without gaps. Source:
// the format section of https://github.com/huggingface/safetensors.

/// An open safetensors file. Const members may be called from several threads at a time.
class SafetensorsReader {
 public:
  /// Reads and checks the header. Throws Error(data) if the file cannot be opened or is invalid:
  /// size or JSON of the header, duplicate names, unknown dtype, a shape that does not match its
  /// bytes, tensors that overlap, leave gaps or reach beyond the data. Error(io) if reading fails.
  explicit SafetensorsReader(std::filesystem::path path);
  ~SafetensorsReader();
  SafetensorsReader(SafetensorsReader&&) noexcept;
  SafetensorsReader& operator=(SafetensorsReader&&) noexcept;

  [[nodiscard]] const std::filesystem::path& path() const;
  /// The open file.
  [[nodiscard]] const Descriptor& descriptor() const;
  /// The tensors in the order of their data.
  [[nodiscard]] const std::vector<StoredTensor>& tensors() const;
  /// Entries of "__metadata__".
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const;
  /// The tensor called `name`, or nullptr. Valid as long as the reader.
  [[nodiscard]] const StoredTensor* find(const std::string& name) const;

  /// Elements [first, first + out.size()) of `name`, row-major, converted exactly to fp32. Throws
  /// Error(data): no such tensor (with the nearest name), beyond its end, a dtype other than F32,
  /// BF16 and F16; Error(io).
  void read(const std::string& name, std::span<float> out, Elems first = 0) const;

  /// Like read(), for a tensor of whole numbers (I8 to I64, U8 to U64, BOOL). A U64 of 2^63 or more
  /// becomes negative.
  void read_whole(const std::string& name, std::span<std::int64_t> out, Elems first = 0) const;

 private:
  struct File;
  std::unique_ptr<File> file_;
};

/// One tensor for SafetensorsWriter.
struct TensorToStore {
  std::string name;
  DType dtype = DType::f32;
  std::vector<std::uint64_t> shape;
  /// Name of the type of a tensor that is copied byte by byte (write_bytes()) instead of being
  /// written as values in `dtype`; "": not copied.
  std::string copied_dtype = {};
  Bytes copied_bytes = 0;  ///< size of a copied tensor
};

/// Size of the tensor in its file.
Bytes bytes_of(const TensorToStore& tensor);

class WriteBuffers;

/// Writes a safetensors file in the background, with the tensors in the given order. The data begin
/// at a multiple of 4 KiB. The format allows no gaps, so a tensor is aligned only if all tensors
/// before it fill whole pages. Data go to PATH.tmp-PID; finish() makes the complete file durable
/// and renames it. Values may come in any order, each once; consecutive values are written fastest.
/// Takes 64 MiB of memory.
class SafetensorsWriter {
 public:
  /// `buffers`: memory shared with other writers of the same thread; null: separate memory. If one
  /// of these writers is destroyed without finish(), the others may fail. Throws Error(io) if the
  /// file cannot be created or the disk lacks the space for it, Error(state) for duplicate names.
  SafetensorsWriter(std::filesystem::path path, const std::vector<TensorToStore>& tensors,
                    const std::map<std::string, std::string>& metadata = {},
                    std::shared_ptr<WriteBuffers> buffers = nullptr);
  /// Removes the temporary file unless finish() was called.
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  /// Writes elements [first, first + values.size()) of `name`, row-major; bf16 and f16 are rounded
  /// to nearest, ties to even. Throws Error(io), Error(state): no such tensor, beyond its end.
  void write(const std::string& name, std::span<const float> values, Elems first = 0);
  /// Like write(), for values that are stored as `type`, the tensor's type.
  void write_stored(const std::string& name, std::span<const std::byte> bytes, DType type,
                    Elems first = 0);
  /// Writes bytes of a copied tensor, from byte `first` on. Throws like write().
  void write_bytes(const std::string& name, std::span<const std::byte> bytes, Bytes first);

  /// Syncs the file, renames it and syncs the folder. Throws Error(io), Error(state) if values are
  /// missing.
  void finish();

 private:
  struct File;
  std::unique_ptr<File> file_;
};

}  // namespace ballast::formats
