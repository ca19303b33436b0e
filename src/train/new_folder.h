#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "ballast/core/units.h"

namespace ballast::train {

/// A folder that gets its name when it is complete: everything goes to FOLDER.tmp-PID, which
/// finish() renames.
class NewFolder {
 public:
  /// For `bytes` of files. Throws Error(usage) if `folder` holds files; Error(io) if it cannot be
  /// made or its disk lacks the space.
  NewFolder(std::filesystem::path folder, Bytes bytes);
  /// Without finish(): removes the temporary folder.
  ~NewFolder();
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  /// Where its files go until finish().
  [[nodiscard]] const std::filesystem::path& temporary() const { return temporary_; }
  /// Adds a small file. Throws Error(io).
  void add(const std::string& name, std::string_view content) const;
  /// Makes the names durable and renames the folder. Throws Error(io).
  void finish();

 private:
  void make() const;
  void check_space(Bytes needed) const;

  std::filesystem::path folder_;
  std::filesystem::path temporary_;
  bool finished_ = false;
};

}  // namespace ballast::train
