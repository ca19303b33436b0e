#pragma once

#include <cstdlib>
#include <filesystem>
#include <string_view>

namespace ballast::test {

/// Path of `name` in the folder of fixtures: BALLAST_TEST_DATA, or tests/data of the current
/// folder.
inline std::filesystem::path fixture(std::string_view name) {
  const char* const data = std::getenv("BALLAST_TEST_DATA");
  return std::filesystem::absolute(data != nullptr ? data : "tests/data") / name;
}

}  // namespace ballast::test
