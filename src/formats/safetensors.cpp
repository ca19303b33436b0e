#include "ballast/formats/safetensors.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <unordered_map>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/memory.h"
#include "ballast/formats/file_formats.h"
#include "ballast/formats/safetensors_header.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

#include "src/formats/write_behind.h"

namespace ballast::formats {
namespace {

static_assert(std::endian::native == std::endian::little, "files are read without swapping bytes");

constexpr std::size_t kChunk = std::size_t{1} << 18;  // elements converted at a time

}  // namespace

struct SafetensorsReader::File {
  std::filesystem::path path;
  Descriptor descriptor;
  SafetensorsHeader header;
  std::unordered_map<std::string, std::size_t> index;

  /// Refuses a file that is recognised as another format.
  void check_format(Bytes size) const;
  void read_header();
  /// Returns the tensor if `count` elements from `first` on are inside it.
  [[nodiscard]] const StoredTensor& range(const std::string& name, Elems first, Elems count) const;
  template <class Stored, class Value, class Convert>
  void read_as(const StoredTensor& tensor, std::span<Value> out, Elems first,
               const Convert& convert) const;
  void read_halves(const StoredTensor& tensor, DType type, std::span<float> out, Elems first) const;
};

void SafetensorsReader::File::check_format(Bytes size) const {
  std::vector<std::byte> start(std::min<Bytes>(size, kFormatBytes));
  text::read_fully(descriptor, path, 0, start);
  const std::string_view found = foreign_format(start);
  if (found.empty()) return;
  // The message for a file for tools/prepare.py has its command.
  const bool json = !start.empty() && static_cast<char>(start.front()) == '{';
  const std::string other = json ? explain_not_safetensors(path) : "";
  throw Error(ErrorCategory::data,
              fmt::format("{} {}", path.string(), other.empty() ? found : other));
}

void SafetensorsReader::File::read_header() {
  const auto size = text::regular_file_size(descriptor, path, ErrorCategory::data);
  check_format(size);
  if (size < kLengthBytes) {
    throw Error(ErrorCategory::data,
                fmt::format("{} has {} bytes: too short for a safetensors file; download or "
                            "copy it again",
                            path.string(), size));
  }
  const auto [length, text] = config::read_header_text(descriptor, path, size);
  if (length > kLongestHeader) {
    const std::string other = explain_not_safetensors(path);
    if (!other.empty()) {
      throw Error(ErrorCategory::data, fmt::format("{} {}", path.string(), other));
    }
  }
  if (!text) {
    throw Error(ErrorCategory::data,
                fmt::format("{} gives a header length of {} bytes (file size {}, limit {}): it is "
                            "truncated or not a safetensors file; download or copy it again",
                            path.string(), length, size, kLongestHeader));
  }
  const auto data = kLengthBytes + length;
  header = parse_header(*text, size - data, path.string());
  for (auto& tensor : header.tensors) {
    tensor.offset += data;
    index.emplace(tensor.name, index.size());
  }
}

const StoredTensor& SafetensorsReader::File::range(const std::string& name, Elems first,
                                                   Elems count) const {
  const auto found = index.find(name);
  if (found == index.end()) {
    std::vector<std::string> names;
    for (const auto& known : header.tensors) names.push_back(text::printable(known.name));
    throw Error(ErrorCategory::data, fmt::format("{} has no tensor '{}'{}", path.string(),
                                                 text::printable(name), did_you_mean(name, names)));
  }
  const auto& tensor = header.tensors[found->second];
  if (first > tensor.elements || count > tensor.elements - first) {
    throw Error(ErrorCategory::data,
                fmt::format("tensor '{}' of {} has {} elements {}; the read ends at {}",
                            text::printable(name), path.string(), tensor.elements,
                            format_shape(tensor.shape), first + count));
  }
  return tensor;
}

/// Reads elements that are stored as `Stored`, piece by piece.
template <class Stored, class Value, class Convert>
void SafetensorsReader::File::read_as(const StoredTensor& tensor, std::span<Value> out, Elems first,
                                      const Convert& convert) const {
  std::vector<Stored> chunk(std::min(out.size(), kChunk));
  for (std::size_t done = 0; done < out.size(); done += chunk.size()) {
    chunk.resize(std::min(chunk.size(), out.size() - done));
    text::read_fully(descriptor, path, tensor.offset + (first + done) * sizeof(Stored),
                     std::as_writable_bytes(std::span(chunk)));
    std::transform(chunk.begin(), chunk.end(), out.begin() + static_cast<std::ptrdiff_t>(done),
                   convert);
  }
}

void SafetensorsReader::File::read_halves(const StoredTensor& tensor, DType type,
                                          std::span<float> out, Elems first) const {
  std::vector<std::byte> chunk;
  for (Bytes at = tensor.offset + first * size_of(type); !out.empty(); at += chunk.size()) {
    const auto count = std::min(out.size(), kChunk);
    chunk.resize(count * size_of(type));
    text::read_fully(descriptor, path, at, chunk);
    decode(chunk, type, out.first(count));
    out = out.subspan(count);
  }
}

SafetensorsReader::SafetensorsReader(std::filesystem::path path) : file_(std::make_unique<File>()) {
  file_->path = std::move(path);
  file_->descriptor = text::open_file(file_->path, O_RDONLY | O_NONBLOCK, ErrorCategory::data);
  file_->read_header();
}

SafetensorsReader::~SafetensorsReader() = default;
SafetensorsReader::SafetensorsReader(SafetensorsReader&&) noexcept = default;
SafetensorsReader& SafetensorsReader::operator=(SafetensorsReader&&) noexcept = default;

const std::filesystem::path& SafetensorsReader::path() const {
  return file_->path;
}

const Descriptor& SafetensorsReader::descriptor() const {
  return file_->descriptor;
}

const std::vector<StoredTensor>& SafetensorsReader::tensors() const {
  return file_->header.tensors;
}

const std::map<std::string, std::string>& SafetensorsReader::metadata() const {
  return file_->header.metadata;
}

const StoredTensor* SafetensorsReader::find(const std::string& name) const {
  const auto found = file_->index.find(name);
  return found == file_->index.end() ? nullptr : &file_->header.tensors[found->second];
}

void SafetensorsReader::read(const std::string& name, std::span<float> out, Elems first) const {
  const auto& tensor = file_->range(name, first, out.size());
  const std::optional<DType> type = weight_type(tensor.dtype);
  if (!type) {
    throw Error(ErrorCategory::data,
                fmt::format("tensor '{}' of {} has dtype {}; weights can be F32, BF16 or F16{}",
                            text::printable(name), path().string(), tensor.dtype,
                            remedy_for_dtype(tensor.dtype)));
  }
  if (*type != DType::f32) return file_->read_halves(tensor, *type, out, first);
  text::read_fully(file_->descriptor, path(), tensor.offset + first * sizeof(float),
                   std::as_writable_bytes(out));
}

void SafetensorsReader::read_whole(const std::string& name, std::span<std::int64_t> out,
                                   Elems first) const {
  const auto& tensor = file_->range(name, first, out.size());
  const auto read_if = [&]<class Stored>(std::string_view dtype, Stored /*type*/) {
    if (tensor.dtype != dtype) return false;
    file_->read_as<Stored>(tensor, out, first,
                           [](Stored value) { return static_cast<std::int64_t>(value); });
    return true;
  };
  const bool known = read_if("U16", std::uint16_t{}) || read_if("U32", std::uint32_t{}) ||
                     read_if("I32", std::int32_t{}) || read_if("U8", std::uint8_t{}) ||
                     read_if("BOOL", std::uint8_t{}) || read_if("I64", std::int64_t{}) ||
                     read_if("U64", std::uint64_t{}) || read_if("I16", std::int16_t{}) ||
                     read_if("I8", std::int8_t{});
  if (!known) {
    throw Error(ErrorCategory::data,
                fmt::format("tensor '{}' of {} has dtype {}, not whole numbers",
                            text::printable(name), path().string(), tensor.dtype));
  }
}

Bytes bytes_of(const TensorToStore& tensor) {
  if (!tensor.copied_dtype.empty()) return tensor.copied_bytes;
  Elems elements = 0;
  expects(count_elements(tensor.shape, elements),
          "safetensors: a tensor has 2^64 or more elements");
  return elements * size_of(tensor.dtype);
}

struct SafetensorsWriter::File {
  struct Tensor {
    DType dtype;
    Bytes width;   // bytes per unit: a value, or a byte of a copied tensor
    Elems size;    // number of units
    Bytes offset;  // from the start of the file
    Elems written = 0;
  };
  WriteBehind output;
  std::unordered_map<std::string, Tensor> tensors;

  /// The tensor of which `count` units from `first` on will be written.
  Tensor& range(const std::string& name, Elems first, Elems count);
  void write(Tensor& tensor, std::span<const std::byte> bytes, Elems first);
};

void SafetensorsWriter::File::write(Tensor& tensor, std::span<const std::byte> bytes, Elems first) {
  output.write(tensor.offset + first * tensor.width, bytes);
  tensor.written += bytes.size() / tensor.width;
}

SafetensorsWriter::File::Tensor& SafetensorsWriter::File::range(const std::string& name,
                                                                Elems first, Elems count) {
  const auto found = tensors.find(name);
  expects(found != tensors.end(), "safetensors: a tensor to write is not in the file");
  Tensor& tensor = found->second;
  expects(
      first <= tensor.size && count <= tensor.size - first && count <= tensor.size - tensor.written,
      "safetensors: too many values for the tensor");
  return tensor;
}

SafetensorsWriter::SafetensorsWriter(std::filesystem::path path,
                                     const std::vector<TensorToStore>& tensors,
                                     const std::map<std::string, std::string>& metadata,
                                     std::shared_ptr<WriteBuffers> buffers) {
  std::vector<StoredTensor> stored;
  std::unordered_map<std::string, File::Tensor> written;
  Bytes bytes = 0;
  for (const auto& tensor : tensors) {
    const bool copied = !tensor.copied_dtype.empty();
    stored.push_back({.name = tensor.name,
                      .dtype = copied ? tensor.copied_dtype : std::string(dtype_name(tensor.dtype)),
                      .shape = tensor.shape,
                      .bytes = bytes_of(tensor)});
    const Bytes width = copied ? 1 : size_of(tensor.dtype);
    written.insert({tensor.name, {tensor.dtype, width, stored.back().bytes / width, bytes}});
    bytes += stored.back().bytes;
  }
  const std::string head = format_head(stored, metadata);
  for (auto& [name, tensor] : written) tensor.offset += head.size();
  if (buffers == nullptr) buffers = std::make_shared<WriteBuffers>();
  file_.reset(
      new File{{std::move(path), head.size() + bytes, std::move(buffers)}, std::move(written)});
  file_->output.write(0, std::as_bytes(std::span(head)));
}

SafetensorsWriter::~SafetensorsWriter() = default;

void SafetensorsWriter::write(const std::string& name, std::span<const float> values, Elems first) {
  const DType type = file_->range(name, first, values.size()).dtype;
  if (type == DType::f32) return write_stored(name, std::as_bytes(values), type, first);
  std::vector<std::byte> chunk;
  while (!values.empty()) {
    const auto count = std::min(values.size(), kChunk);
    chunk.resize(count * size_of(type));
    encode(values.first(count), type, chunk);
    write_stored(name, chunk, type, first);
    values = values.subspan(count);
    first += count;
  }
}

void SafetensorsWriter::write_stored(const std::string& name, std::span<const std::byte> bytes,
                                     DType type, Elems first) {
  const Elems count = bytes.size() / size_of(type);
  File::Tensor& tensor = file_->range(name, first, count);
  expects(tensor.dtype == type && tensor.width == size_of(type),
          "safetensors: stored values do not match the tensor");
  file_->write(tensor, bytes, first);
}

void SafetensorsWriter::write_bytes(const std::string& name, std::span<const std::byte> bytes,
                                    Bytes first) {
  File::Tensor& tensor = file_->range(name, first, bytes.size());
  expects(tensor.width == 1, "safetensors: bytes of a tensor that is not copied");
  file_->write(tensor, bytes, first);
}

void SafetensorsWriter::finish() {
  expects(std::all_of(file_->tensors.begin(), file_->tensors.end(),
                      [](const auto& entry) { return entry.second.written == entry.second.size; }),
          "safetensors: the file was finished before all its values were written");
  file_->output.commit();
}

}  // namespace ballast::formats
