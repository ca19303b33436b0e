#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "ballast/text/json.h"

#include "tools/bench/page.h"

namespace ballast::tools {

/// Options of `ballast bench io`.
struct BenchIoArguments {
  std::vector<std::string> paths;
  std::vector<std::string> patterns = {"read", "write", "mixed"};
  std::vector<std::string> blocks = {"1MiB"};
  std::vector<unsigned> depths = {32};
  std::vector<std::string> backends = {"auto"};
  std::string size = "2GiB";
  std::optional<double> seconds;
  bool sqpoll = false;
  bool iopoll = false;
  bool buffered = false;
  bool check = false;
  bool list_backends = false;
  bool json = false;
  std::string job;
  PageFile html;
};

/// Measures all combinations and returns a JSON array with one object per combination. Prints a
/// table unless `arguments.json`. Throws Error.
text::Json bench_io(const BenchIoArguments& arguments);

}  // namespace ballast::tools
