#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"

namespace ballast::test {

/// Calls as text, one line each: the name and all arguments. Pointers are written as REGION+bytes,
/// so that lists of two programs can be compared.
class CallLog {
 public:
  /// Returns the begin of the region `name`, a range of addresses that must not be read. Regions
  /// are kRegionBytes apart.
  std::byte* region(std::string_view name) {
    std::size_t index = 0;
    while (index < regions_.size() && regions_[index] != name) ++index;
    if (index == regions_.size()) regions_.emplace_back(name);
    return reinterpret_cast<std::byte*>((index + 1) * kRegionBytes);
  }

  template <class... Args>
  void call(std::string_view name, const Args&... args) {
    line_ = name;
    (..., add(args));
    lines_.push_back(std::move(line_));
  }

  std::vector<std::string> take_lines() { return std::exchange(lines_, {}); }

  /// Appends an argument to the line. Structs have a function show(CallLog&, const S&) in their
  /// namespace, which calls add() for each member.
  template <class V>
  void add(const V& value) {
    if constexpr (std::is_pointer_v<V>) {
      add_address(reinterpret_cast<std::uintptr_t>(value));
    } else if constexpr (std::is_same_v<V, bool>) {
      line_ += value ? " yes" : " no";
    } else if constexpr (std::is_enum_v<V>) {
      fmt::format_to(std::back_inserter(line_), " {}", static_cast<int>(value));
    } else if constexpr (std::is_floating_point_v<V>) {
      // Libraries of mathematics differ in the last bits.
      fmt::format_to(std::back_inserter(line_), " {:.6g}", value);
    } else if constexpr (std::is_arithmetic_v<V> || std::is_convertible_v<V, std::string_view>) {
      fmt::format_to(std::back_inserter(line_), " {}", value);
    } else {
      show(*this, value);
    }
  }
  /// Appends a struct's members in parentheses.
  template <class... Members>
  void add_group(const Members&... members) {
    line_ += " (";
    (..., add(members));
    line_ += " )";
  }

 private:
  static constexpr std::size_t kRegionBytes = std::size_t{1} << 40U;

  void add_address(std::uintptr_t address) {
    if (address == 0) {
      line_ += " -";
      return;
    }
    const std::size_t index = address / kRegionBytes - 1;
    expects(index < regions_.size(), "an argument points to no region of the log");
    fmt::format_to(std::back_inserter(line_), " {}+{}", regions_[index], address % kRegionBytes);
  }

  std::vector<std::string> regions_;
  std::vector<std::string> lines_;
  std::string line_;
};

}  // namespace ballast::test
