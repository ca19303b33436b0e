#pragma once

#include <cstdint>
#include <filesystem>

#include "ballast/core/descriptor.h"

namespace ballast::train {

/// Watches whether a directory keeps its name while files in it are written.
class RunPlace {
 public:
  enum class Fate : std::uint8_t {
    there,    ///< exists, or unknown, because the path cannot be checked now
    moved,    ///< it has another name
    deleted,  ///< its name is unused, or belongs to an empty directory
    replaced  ///< it was deleted, and another directory has its name
  };
  struct Found {
    Fate fate = Fate::there;
    std::filesystem::path now;  ///< the new path, if it was moved
  };

  /// Throws Error(io) if the directory cannot be opened.
  explicit RunPlace(std::filesystem::path directory);

  /// Looks up the directory with two system calls.
  [[nodiscard]] Found look() const;

 private:
  [[nodiscard]] Found find() const;

  std::filesystem::path directory_;
  Descriptor descriptor_;
};

}  // namespace ballast::train
