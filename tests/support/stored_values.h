#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "ballast/formats/safetensors.h"
#include "ballast/model/architecture.h"

namespace ballast::test {

/// The block's part of the tensor NAME, or PREFIX + NAME, in the order of memory.
inline std::vector<float> read_tensor(const formats::SafetensorsReader& from,
                                      const model::TensorSpec& tensor,
                                      const std::string& prefix = "") {
  const std::string& name = tensor.name_in_files.empty() ? tensor.name : tensor.name_in_files;
  // Reads all of it if it is in several blocks.
  std::vector<float> stored(from.find(prefix + name)->elements);
  from.read(prefix + name, stored);
  std::vector<float> found;
  while (found.size() < tensor.size) {
    const model::TensorRun run = model::run_in_files(tensor, found.size());
    const auto first = stored.begin() + static_cast<std::ptrdiff_t>(run.first);
    const Elems count = std::min<Elems>(run.count, tensor.size - found.size());
    found.insert(found.end(), first, first + static_cast<std::ptrdiff_t>(count));
  }
  model::split_into_addends(tensor, 0, found);
  return found;
}

}  // namespace ballast::test
