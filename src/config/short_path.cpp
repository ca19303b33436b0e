#include "src/config/short_path.h"

#include <set>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "src/config/sections.h"

namespace ballast::config {
namespace {

void add_paths(const Section& section, const std::string& prefix, std::set<std::string>& paths) {
  for (const Key& key : section) {
    const std::string path = prefix + key.name;
    paths.insert(path);
    if (key.inner) add_paths(key.inner(), path + ".", paths);
  }
}

/// The paths of all keys and sections, DeepSpeed's keys without effect included.
std::set<std::string> make_paths() {
  Config config;
  std::set<std::string> paths;
  add_paths(all_keys(config), "", paths);
  return paths;
}

}  // namespace

std::string whole_path(const std::string& path,
                       const std::function<void(const std::string&)>& refuse) {
  static const std::set<std::string> all = make_paths();
  if (path.empty() || all.contains(path.substr(0, path.find('.')))) return path;
  std::vector<std::string> found;
  for (const std::string& one : all) {
    if (one.ends_with("." + path)) found.push_back(one);
  }
  if (found.empty()) return path;
  if (found.size() > 1) {
    refuse(
        fmt::format("several sections have '{}'; write one of {}", path, fmt::join(found, ", ")));
  }
  return found.front();
}

}  // namespace ballast::config
