#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/descriptor.h"
#include "ballast/text/files.h"

namespace ballast::text {

/// Decides whether a file that exists at a path of the user may be replaced.
struct OutputRule {
  std::string kind;        ///< of the file to write, for messages: "a page of ballast"
  std::string begins;      ///< the first bytes of every file of this kind; "": it has no mark
  bool overwrite = false;  ///< the user has given --overwrite
  /// Files that the same command reads, and folders of them. They are not replaced even then.
  std::vector<std::filesystem::path> inputs = {};
};

/// The rule for every file that a command writes where the user says. Devices, pipes and what
/// /dev/stdout and /dev/fd name are written to. A new path and an empty file are free. A file is
/// replaced if it begins like those of this kind, or with --overwrite; inputs never. A symbolic
/// link to a file is replaced with --overwrite only: the link itself, not its target. Throws
/// Error(usage) for a file that stays, Error(io) if `path` cannot be written. Leaves no file. Call
/// before the work.
void check_output(const std::filesystem::path& path, const OutputRule& rule);

/// Throws Error(usage) if two outputs of a command are the same file. "" is no file.
void refuse_same_output(const std::filesystem::path& one, const std::filesystem::path& other);

/// check_output(), then the whole file. Throws like OutputFile.
void write_output(const std::filesystem::path& path, const OutputRule& rule,
                  std::string_view content);

/// Whether writing to `path` writes to standard output, where a command then prints nothing else.
bool is_standard_output(const std::filesystem::path& path);

/// A file under this rule. Files are written like ReplacedFile: they appear whole or not at all.
class OutputFile {
 public:
  /// Throws like check_output(), also for a file that was made since then. Waits for the reader of
  /// a named pipe; Error(interrupted) if a signal ends that.
  OutputFile(std::filesystem::path path, const OutputRule& rule);

  /// Appends. Throws Error(io) naming the file.
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  /// Gives the file its name. Throws Error(io), Error(usage) if another one has it now.
  void commit();

 private:
  std::filesystem::path path_;
  std::optional<ReplacedFile> file_;
  Descriptor stream_;  ///< without a file
  bool is_new_ = true;
};

}  // namespace ballast::text
