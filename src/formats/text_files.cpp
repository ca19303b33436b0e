#include "src/formats/text_files.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>

#include <fcntl.h>
#include <fmt/format.h>
#include <glob.h>
#include <unistd.h>

#include "ballast/core/error.h"
#include "ballast/text/files.h"

namespace ballast::formats {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kProbedBytes = 64 * kKiB;

[[noreturn]] void throw_unreadable(const fs::path& path, const std::error_code& code) {
  throw Error(ErrorCategory::data, fmt::format("cannot read {}", path.string()), code.value());
}

bool holds_nul(const fs::path& path) {
  const auto file = text::open_file(path, O_RDONLY, ErrorCategory::data);
  std::array<char, 4096> buffer;
  for (std::size_t offset = 0; offset < kProbedBytes;) {
    const auto count =
        ::pread(file.number(), buffer.data(), buffer.size(), static_cast<off_t>(offset));
    if (count < 0) {
      if (errno == EINTR) continue;
      throw_unreadable(path, {errno, std::generic_category()});
    }
    if (count == 0) return false;
    if (std::memchr(buffer.data(), 0, static_cast<std::size_t>(count)) != nullptr) return true;
    offset += static_cast<std::size_t>(count);
  }
  return false;
}

/// `extension`: the extension of token files.
bool is_accepted(const fs::path& path, FolderFilter filter, std::string_view extension) {
  switch (filter) {
    case FolderFilter::text:
      break;
    case FolderFilter::token_bin:
      return path.extension() == extension;
    case FolderFilter::documents:
      return path.extension() == ".safetensors";
  }
  return !holds_nul(path);
}

std::string_view name_of(FolderFilter filter) {
  switch (filter) {
    case FolderFilter::text:
      break;
    case FolderFilter::token_bin:
      return "token file (.bin or .npy)";
    case FolderFilter::documents:
      return "file of documents (.safetensors)";
  }
  return "text file";
}

bool is_skipped_folder(const fs::path& path) {
  const auto name = path.filename().string();
  return name.starts_with('.') || name.starts_with("build");
}

void walk(const fs::path& folder, FolderFilter filter, std::string_view extension,
          std::vector<ListedFile>& files) {
  std::error_code code;
  std::vector<fs::directory_entry> entries;
  fs::directory_iterator entry(folder, code);
  for (; !code && entry != fs::directory_iterator(); entry.increment(code)) {
    entries.push_back(*entry);
  }
  if (code) throw_unreadable(folder, code);
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    return a.path().filename().native() < b.path().filename().native();
  });
  for (const auto& child : entries) {
    std::error_code ignored;  // a dangling link is neither file nor folder
    if (child.is_directory(ignored)) {
      if (!child.is_symlink(ignored) && !is_skipped_folder(child.path())) {
        walk(child.path(), filter, extension, files);
      }
    } else if (child.is_regular_file(ignored) && is_accepted(child.path(), filter, extension)) {
      files.push_back({.path = child.path(), .in_folder = true});
    }
  }
}

void walk(const fs::path& folder, FolderFilter filter, std::vector<ListedFile>& files) {
  const std::size_t before = files.size();
  walk(folder, filter, ".bin", files);
  // Other arrays, such as masks, often lie next to .bin files.
  if (filter == FolderFilter::token_bin && files.size() == before) {
    walk(folder, filter, ".npy", files);
  }
}

std::vector<fs::path> expand_glob(const std::string& pattern) {
  glob_t found = {};
  const int status = ::glob(pattern.c_str(), GLOB_NOSORT | GLOB_ERR, nullptr, &found);
  const int error_number = errno;
  std::vector<fs::path> paths;
  if (status == 0) paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  ::globfree(&found);
  if (status != 0 && status != GLOB_NOMATCH) {
    throw Error(ErrorCategory::data, fmt::format("cannot expand {}", pattern), error_number);
  }
  std::sort(paths.begin(), paths.end(),
            [](const auto& a, const auto& b) { return a.native() < b.native(); });
  return paths;
}

void add_pattern(const std::string& pattern, FolderFilter filter, std::vector<ListedFile>& files) {
  std::error_code code;
  const auto status = fs::status(pattern, code);
  if (fs::is_directory(status)) {
    walk(pattern, filter, files);
  } else if (fs::exists(status)) {
    files.push_back({.path = pattern});
  } else if (pattern.find_first_of("*?[") == std::string::npos) {
    throw_unreadable(pattern,
                     code ? code : std::make_error_code(std::errc::no_such_file_or_directory));
  } else {
    for (const auto& path : expand_glob(pattern)) {
      if (fs::is_directory(path, code)) {
        if (!is_skipped_folder(path)) walk(path, filter, files);
      } else if (fs::is_regular_file(path, code) &&
                 (filter != FolderFilter::text || !holds_nul(path))) {
        files.push_back({.path = path});
      }
    }
  }
}

}  // namespace

std::vector<ListedFile> list_files(std::span<const std::string> patterns, FolderFilter filter) {
  std::vector<ListedFile> files;
  for (const auto& pattern : patterns) {
    const auto before = files.size();
    add_pattern(pattern, filter, files);
    if (files.size() == before) {
      throw Error(ErrorCategory::data,
                  fmt::format("no {} matches {}: check the path", name_of(filter), pattern));
    }
  }
  return files;
}

}  // namespace ballast::formats
