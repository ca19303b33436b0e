#include "tools/commands/inspect_swap.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "ballast/checkpoint/swap_files.h"
#include "ballast/core/units.h"
#include "ballast/text/json.h"

namespace ballast::tools {
namespace {

using checkpoint::SwapFile;
using checkpoint::SwapUse;
using text::Json;

std::vector<SwapFile> unowned_of(const std::vector<SwapFile>& files) {
  std::vector<SwapFile> found;
  std::copy_if(files.begin(), files.end(), std::back_inserter(found),
               [](const SwapFile& file) { return file.use == SwapUse::unowned; });
  return found;
}

std::string counted(std::size_t count) {
  return fmt::format("{} file{}", count, count == 1 ? "" : "s");
}

/// Explains the state of a file.
std::string explain(const SwapFile& file) {
  const std::string run = file.run.string();
  switch (file.use) {
    case SwapUse::in_use:
      return run.empty() ? "by a process" : fmt::format("by a process that trains in {}", run);
    case SwapUse::kept:
      return fmt::format("for {}", file.checkpoint.string());
    case SwapUse::leftover:
      return fmt::format("of {}, which removes it when it continues", run);
    case SwapUse::unowned:
      return run.empty() ? "left by a crashed process"
                         : fmt::format("its run {} does not exist", run);
    case SwapUse::unknown:
      return file.note;
  }
  return "";
}

Json json_of(const std::vector<SwapFile>& files) {
  const auto path_or_null = [](const std::filesystem::path& path) {
    return path.empty() ? Json() : Json(path.string());
  };
  Json list = Json::array();
  for (const SwapFile& file : files) {
    Json entry = Json::object({{"path", file.path.string()},
                               {"bytes", file.bytes},
                               {"state", to_string(file.use)},
                               {"run", path_or_null(file.run)},
                               {"run_exists", file.run_exists},
                               {"checkpoint", path_or_null(file.checkpoint)}});
    if (!file.note.empty()) entry["note"] = file.note;
    list.push_back(std::move(entry));
  }
  return list;
}

void print_list(const std::filesystem::path& directory, const std::vector<SwapFile>& files) {
  if (files.empty()) return fmt::print("no swap files in {}\n", directory.string());
  fmt::print("swap files in {}\n", directory.string());
  std::size_t width = 0;
  for (const SwapFile& file : files) {
    width = std::max(width, file.path.filename().string().size());
  }
  for (const SwapFile& file : files) {
    fmt::print("  {:<{}}  {:>10}  {:<8}  {}\n", file.path.filename().string(), width,
               format_bytes(file.bytes), to_string(file.use), explain(file));
  }
  fmt::print("{} in {}\n", format_bytes(space_of(files)), counted(files.size()));
}

}  // namespace

void inspect_swap(const std::filesystem::path& directory, bool remove, bool json) {
  std::vector<SwapFile> files = checkpoint::list_swap_files(directory);
  const std::vector<SwapFile> unowned = unowned_of(files);
  std::vector<SwapFile> removed;
  if (remove) {
    removed = checkpoint::remove_unowned(directory, unowned);
    std::erase_if(files, [&](const SwapFile& file) {
      return std::any_of(removed.begin(), removed.end(),
                         [&](const SwapFile& gone) { return gone.path == file.path; });
    });
  }
  const Bytes removed_bytes = space_of(removed);
  if (json) {
    constexpr unsigned kLevels = 2;  // one line per file
    const Json out = Json::object({{"path", directory.string()},
                                   {"bytes", space_of(files)},
                                   {"unowned_bytes", space_of(unowned_of(files))},
                                   {"files", json_of(files)},
                                   {"removed", json_of(removed)},
                                   {"removed_bytes", removed_bytes}});
    return fmt::print("{}\n", out.pretty(kLevels));
  }
  print_list(directory, files);
  for (const SwapFile& file : removed) fmt::print("removed {}\n", file.path.string());
  if (remove) {
    fmt::print("removed {} with {}\n", counted(removed.size()), format_bytes(removed_bytes));
  } else if (!unowned.empty()) {
    fmt::print("{} in {} that no run owns; --remove removes them\n",
               format_bytes(space_of(unowned)), counted(unowned.size()));
  }
}

}  // namespace ballast::tools
