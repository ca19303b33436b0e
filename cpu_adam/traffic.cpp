#include "ballast/cpu_adam/traffic.h"

#include "cpu_adam/pieces.h"

namespace ballast::cpu_adam {

Bytes Traffic::bytes_of(std::string_view name) const {
  for (const Array& array : arrays) {
    if (array.name == name) return array.bytes;
  }
  return 0;
}

Bytes Traffic::bytes_per_element() const {
  Bytes sum = 0;
  for (const Array& array : arrays) {
    sum += (array.read ? array.bytes : 0) + (array.written ? array.bytes : 0);
  }
  return sum;
}

Bytes Traffic::stored_per_element() const {
  Bytes sum = 0;
  for (const Array& array : arrays) sum += array.bytes;
  return sum;
}

std::string Traffic::formula() const {
  std::string reads;
  std::string writes;
  for (const Array& array : arrays) {
    std::string term(" ");
    term.append(array.name).append(std::to_string(array.bytes));
    if (array.read) reads += term;
    if (array.written) writes += term;
  }
  const std::string sum = std::to_string(bytes_per_element());
  return "read" + reads + " + write" + writes + " = " + sum + " bytes/parameter";
}

Traffic traffic(Optimizer optimizer, Weights::Format weights, DType gradient,
                Moments::Format moments) {
  const ElementSizes sizes = sizes_of(optimizer, weights, gradient, moments);
  Traffic result = {.first_moment = sizes.first, .second_moment = sizes.second};
  const auto add = [&result](std::string_view name, std::size_t bytes, bool read, bool written) {
    if (bytes > 0) result.arrays.push_back({name, bytes, read, written});
  };
  add("w", sizes.main, true, true);
  add(sizes.loads_remainder ? "r" : "c", sizes.remainder_or_copy, sizes.loads_remainder, true);
  add("m", sizes.first, true, true);
  add("v", sizes.second, true, true);
  add("g", sizes.gradient, true, false);
  return result;
}

}  // namespace ballast::cpu_adam
