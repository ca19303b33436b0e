#include "tools/usage/paths.h"

#include <cstdlib>
#include <filesystem>
#include <system_error>
#include <vector>

#include <fmt/format.h>

#include "ballast/config/model_source.h"
#include "ballast/core/suggest.h"
#include "ballast/text/json.h"

namespace ballast::tools {
namespace {

namespace fs = std::filesystem;

bool there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

/// Returns " (did you mean 'config.json'?)" with a name similar to the missing one, or "".
std::string similar_name(const fs::path& missing) {
  constexpr std::size_t kMost = 4096;
  const fs::path folder = missing.has_parent_path() ? missing.parent_path() : ".";
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), none;
       !error && entry != none && names.size() < kMost; entry.increment(error)) {
    names.push_back((missing.parent_path() / entry->path().filename()).string());
  }
  const std::string near = nearest(missing.string(), names);
  return near.empty() ? "" : fmt::format(" (did you mean '{}'?)", near);
}

std::string missing_path(Names takes, const std::string& text) {
  const fs::path path(text);
  if (const char* home = std::getenv("HOME"); home != nullptr && text.starts_with("~/")) {
    const fs::path expanded = fs::path(home) / text.substr(2);
    if (there(expanded)) {
      return fmt::format("{}: the shell does not expand ~ in quotes; give {}", text,
                         expanded.string());
    }
  }
  for (fs::path part = path.parent_path(); !part.empty() && part != part.root_path();
       part = part.parent_path()) {
    std::error_code ignored;
    if (there(part) && !fs::is_directory(part, ignored)) {
      return fmt::format("{}: {} is a file, not a folder", text, part.string());
    }
  }
  const char* const kind = takes == Names::file     ? "file"
                           : takes == Names::folder ? "directory"
                                                    : "file or folder";
  const std::string near = similar_name(path);
  const std::string hint =
      takes == Names::model && near.empty() ? config::download_hint(text) : std::string();
  return fmt::format("{}: no such {}{}{}", text, kind, near, hint.empty() ? "" : ". " + hint);
}

std::string folder_for_file(const std::string& text) {
  const fs::path folder(text);
  if (there(folder / "run.json") && there(folder / "config.json")) {
    return fmt::format("{} is the directory of a run, not a file; its config is {}", text,
                       (folder / "config.json").string());
  }
  if (there(folder / "config.json")) {
    return fmt::format("{} is the folder of a model, not a file; a config names it as model.path",
                       text);
  }
  return fmt::format("{} is a directory; give a file", text);
}

std::string file_for_folder(const std::string& text) {
  const fs::path folder = fs::path(text).parent_path();
  const bool of_run = there(folder / "run.json");
  return fmt::format("{} is not a directory; give {}", text, of_run ? folder.string() : "one");
}

/// Missing folders are made, or refused by the command.
std::string mistake_in_new(Names takes, const fs::path& path) {
  std::error_code error;
  if (takes == Names::new_folder && there(path) && !fs::is_directory(path, error)) {
    return fmt::format("{} is a file, not a folder; choose another", path.string());
  }
  for (fs::path place = path.parent_path(); !place.empty(); place = place.parent_path()) {
    const fs::file_status status = fs::status(place, error);
    if (fs::is_directory(status) || status.type() == fs::file_type::none) return "";
    if (fs::exists(status)) {
      return fmt::format("{}: {} is a file, not a folder", path.string(), place.string());
    }
  }
  return "";
}

std::string mistake(Names takes, const std::string& path) {
  if (takes == Names::new_path || takes == Names::new_folder) return mistake_in_new(takes, path);
  const bool reads = takes == Names::file || takes == Names::folder || takes == Names::path ||
                     takes == Names::model;
  if (!reads || path.empty() || path.find_first_of("*?[") != std::string::npos) return "";
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (status.type() == fs::file_type::not_found) {
    // Throws if the working directory was deleted, which main_program() reports.
    if (fs::path(path).is_relative()) static_cast<void>(fs::current_path());
    return missing_path(takes, path);
  }
  // If the permission to look at it is missing, the reader reports that.
  if (status.type() == fs::file_type::none) return "";
  const bool folder = fs::is_directory(status);
  if (takes == Names::file && folder) return folder_for_file(path);
  return takes == Names::folder && !folder ? file_for_folder(path) : "";
}

}  // namespace

std::string path_mistake(Names takes, const std::string& path) {
  constexpr std::size_t kLongest = 8192;
  return text::printable(mistake(takes, path), kLongest);
}

}  // namespace ballast::tools
