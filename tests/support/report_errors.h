#pragma once

#include <cstdio>
#include <exception>
#include <string>

#include "ballast/core/error.h"

namespace ballast::test {

/// Runs the main part of a program that a test starts. Returns its exit status: 1 after an
/// exception, which it prints in one line.
template <class Work>
int report_errors(const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    std::fprintf(stderr, "%s error: %s\n", std::string(to_string(error.category())).c_str(),
                 error.what());
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
  return 0;
}

}  // namespace ballast::test
