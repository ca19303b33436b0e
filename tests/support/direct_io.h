#pragma once

#include <filesystem>

#include <fcntl.h>
#include <unistd.h>

namespace ballast::test {

/// Whether files in `directory` can be opened for direct I/O, determined without the code under
/// test.
inline bool has_direct_io(const std::filesystem::path& directory) {
  const auto path = directory / "direct-io-trial";
  const int descriptor = open(path.c_str(), O_RDWR | O_CREAT | O_DIRECT, 0600);
  if (descriptor >= 0) close(descriptor);
  unlink(path.c_str());
  return descriptor >= 0;
}

}  // namespace ballast::test
