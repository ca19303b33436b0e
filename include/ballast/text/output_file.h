#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/memory.h"
#include "ballast/text/files.h"

namespace ballast::text {

/// Decides whether a file that exists at a path of the user may be replaced.
struct OutputRule {
  std::string kind;        ///< kind of the file, for messages: "a page of ballast"
  std::string begins;      ///< first bytes of every file of this kind; "" if it has no mark
  bool overwrite = false;  ///< whether the user has given --overwrite
  /// Files that the same command reads, and folders of such files. They are never replaced.
  std::vector<std::filesystem::path> inputs = {};
};

/// The rule for every file that a command writes where the user says. Devices, pipes and the
/// targets of /dev/stdout and /dev/fd are written to. A new path and an empty file are free. A file
/// is replaced if it begins like those of this kind, or with --overwrite; inputs are never
/// replaced. A symbolic link to a file is replaced only with --overwrite: the link itself, not its
/// target. Throws Error(usage) for a file that must not be replaced and for a missing folder,
/// Error(io) if `path` cannot be written. Leaves no file. Call before the work.
void check_output(const std::filesystem::path& path, const OutputRule& rule);

/// Throws Error(usage) if two outputs of a command are the same file. "" is no file.
void refuse_same_output(const std::filesystem::path& one, const std::filesystem::path& other);

/// Calls check_output() and then writes the whole file. Throws like OutputFile.
void write_output(const std::filesystem::path& path, const OutputRule& rule,
                  std::string_view content);

/// If writing to `path` writes to standard output, keeps standard output for files under this rule:
/// everything else that the process prints there goes to standard error from now on. Call before
/// the first line is printed. Does nothing for other paths and for /dev/null.
void reserve_standard_output(const std::filesystem::path& path);

/// A file under this rule. Files are written like ReplacedFile: they appear complete or not at all.
class OutputFile {
 public:
  /// Throws like check_output(), also for a file that was made after that. Waits for the reader of
  /// a named pipe; Error(interrupted) if a signal ends the wait.
  OutputFile(std::filesystem::path path, const OutputRule& rule);

  /// Appends. Throws Error(io) naming the file.
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  /// Gives the file its name. Throws Error(io), Error(usage) if another file has the name by now.
  void commit();

 private:
  std::filesystem::path path_;
  std::optional<ReplacedFile> file_;
  Descriptor stream_;  ///< null for a regular file
  bool is_new_ = true;
};

}  // namespace ballast::text
