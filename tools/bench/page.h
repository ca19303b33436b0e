#pragma once

#include <filesystem>
#include <string>

#include "ballast/text/json.h"

namespace ballast::tools {

class Command;

struct PageFile {
  std::filesystem::path path;  ///< empty: no page
  bool overwrite = false;      ///< whether to replace a file that is not a page
};

/// The page of `ballast bench NAME --html`, with the figures of earlier runs on this machine. They
/// are kept in $XDG_CACHE_HOME/ballast/bench-NAME-HASH.json (calibrate/machine_files.h), where HASH
/// identifies host and processor: the latest runs, at most 50 and less than 1 MiB.
class BenchPage {
 public:
  /// Adds --html and --overwrite to `command`.
  static void add_options(Command command, PageFile& file);

  /// Throws like text::check_output().
  BenchPage(std::string bench, PageFile file);
  /// Writes the page of `rows`, an array of figures (--json), and keeps them. If they cannot be
  /// kept, prints a warning. `announce`: prints where the page is. Throws like text::OutputFile.
  void write(const text::Json& rows, bool announce) const;

 private:
  std::string bench_;
  PageFile file_;
};

}  // namespace ballast::tools
