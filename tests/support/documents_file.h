#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>

namespace ballast::test {

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  std::string bytes(values.size() * sizeof(T), '\0');
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

/// A tensor of a safetensors file.
struct RawTensor {
  std::string name;
  std::string dtype;
  std::string shape;  ///< "[3]"
  std::string bytes;
};

/// The bytes of a safetensors file; `metadata` is the inside of a JSON object.
inline std::string safetensors_of(const std::vector<RawTensor>& tensors,
                                  const std::string& metadata) {
  std::string header = fmt::format(R"({{"__metadata__":{{{}}})", metadata);
  std::string data;
  for (const auto& tensor : tensors) {
    header +=
        fmt::format(R"(,"{}":{{"dtype":"{}","shape":{},"data_offsets":[{},{}]}})", tensor.name,
                    tensor.dtype, tensor.shape, data.size(), data.size() + tensor.bytes.size());
    data += tensor.bytes;
  }
  header += '}';
  return bytes_of(std::vector<std::uint64_t>{header.size()}) + header + data;
}

inline const std::string kDocumentsFormat = R"("format":"ballast documents","version":"1")";

/// The bytes of a file of `documents`; without `mask`, all tokens are trained on.
inline std::string documents_of(const std::vector<std::vector<std::uint16_t>>& documents,
                                const std::optional<std::vector<std::uint8_t>>& mask = {},
                                const std::string& metadata = kDocumentsFormat) {
  std::vector<std::uint16_t> tokens;
  std::vector<std::int64_t> offsets = {0};
  for (const auto& document : documents) {
    tokens.insert(tokens.end(), document.begin(), document.end());
    offsets.push_back(static_cast<std::int64_t>(tokens.size()));
  }
  const auto shape = [](std::size_t count) { return fmt::format("[{}]", count); };
  std::vector<RawTensor> tensors = {{"documents", "I64", shape(offsets.size()), bytes_of(offsets)},
                                    {"tokens", "U16", shape(tokens.size()), bytes_of(tokens)}};
  if (mask) tensors.push_back({"mask", "U8", shape(mask->size()), bytes_of(*mask)});
  return safetensors_of(tensors, metadata);
}

}  // namespace ballast::test
