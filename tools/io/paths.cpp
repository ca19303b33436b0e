#include "tools/io/paths.h"

#include <algorithm>

#include <fmt/format.h>

#include "ballast/aio/file_system.h"
#include "ballast/core/error.h"

#include "tools/io/content.h"

namespace ballast::tools {

std::vector<std::filesystem::path> measured_paths(const std::vector<std::string>& given,
                                                  std::string_view task) {
  if (given.size() > IoContent::kMostFiles) {
    throw Error(ErrorCategory::usage, fmt::format("{}: --path: got {} folders; give at most {}",
                                                  task, given.size(), IoContent::kMostFiles));
  }
  std::vector<std::filesystem::path> paths;
  for (const std::string& text : given) {
    auto path = std::filesystem::absolute(text).lexically_normal();
    if (!path.has_filename() && path.has_relative_path()) path = path.parent_path();
    if (std::find(paths.begin(), paths.end(), path) != paths.end()) {
      throw Error(ErrorCategory::usage, fmt::format("{}: --path {} is given twice", task, text));
    }
    static_cast<void>(aio::inspect_file_system(path));
    paths.push_back(std::move(path));
  }
  return paths;
}

std::string describe_path(const std::filesystem::path& path) {
  const aio::FileSystem file_system = aio::inspect_file_system(path);
  const std::string free = file_system.free ? format_bytes(*file_system.free) + " free" : "";
  const std::string against = aio::unsuited_for_swap(file_system, path);
  return fmt::format("{}: {}{}{}{}{}", path.string(), file_system.type, free.empty() ? "" : ", ",
                     free, against.empty() ? "" : "\n  not suited for swapping: ", against);
}

Bytes read_size(const std::string& text, std::string_view option) {
  try {
    return parse_bytes(text);
  } catch (const Error& error) {
    throw error.with_context(option);
  }
}

}  // namespace ballast::tools
