#pragma once

#include <filesystem>
#include <string>

#include "ballast/text/json.h"

namespace ballast::tools {

class Command;

/// The page of `ballast bench NAME --html`, with the figures of earlier such runs on this machine.
/// They are kept in $XDG_CACHE_HOME/ballast/bench-NAME-HASH.json (planning/machine_files.h), for
/// the hash of host and processor: the newest runs, at most 50 and less than 1 MiB.
class BenchPage {
 public:
  /// Adds --html to `command`.
  static void add_option(Command command, std::filesystem::path& file);

  /// No page without `file`. Throws like check_page_file().
  BenchPage(std::string bench, std::filesystem::path file);
  /// Writes the page of `rows`, an array of figures (--json), and keeps them. If it cannot keep
  /// them, that is a warning. `announce`: prints where the page is. Throws Error(io).
  void write(const text::Json& rows, bool announce) const;

 private:
  std::string bench_;
  std::filesystem::path file_;
};

}  // namespace ballast::tools
