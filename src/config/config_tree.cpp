#include "src/config/config_tree.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/error.h"

namespace ballast::config {
namespace {

[[noreturn]] void fail_with(const std::string& message) {
  throw Error(ErrorCategory::config, message);
}

Json parse_file(const std::string& text, const std::string& name) {
  if (text.find_first_not_of(" \t\r\n") == std::string::npos) {
    fail_with(name + ": the file is empty; expected a JSON object");
  }
  Json root = text::parse_json(text, name, {.comments = true, .non_finite = true});
  if (!root.is_object()) {
    fail_with(fmt::format("{}: expected a JSON object at the top, got {}", name, root.described()));
  }
  return root;
}

}  // namespace

Document::Document(const std::string& text, const std::filesystem::path& base,
                   const std::string& name, std::span<const std::string> overrides,
                   const PathRule& whole_path)
    : name_(printable(name, 4096)),
      base_(std::filesystem::weakly_canonical(std::filesystem::absolute(base))),
      root_(parse_file(text, name_)) {
  for (const auto& assignment : overrides) apply(assignment, whole_path);
}

void Document::fail(const std::string& path, const std::string& message) const {
  std::string origin;
  for (std::string at = path; !at.empty();) {
    if (const auto found = origins_.find(at); found != origins_.end()) {
      origin = fmt::format(" ({})", found->second);
      break;
    }
    const auto up = at.find_last_of(".[");
    at = up == std::string::npos ? "" : at.substr(0, up);
  }
  const std::string where = path.empty() ? "" : printable(path, 400) + origin + ": ";
  fail_with(fmt::format("{}: {}{}", name_, where, message));
}

void Document::replace_section(const std::string& name, Json section, const std::string& origin) {
  const Json* const before = root_.find(name);
  for (const auto& member : section.members()) {
    const bool kept = before != nullptr && before->find(member.key) != nullptr;
    if (kept) continue;
    origins_[name + "." + member.key] = origin;
    replaced_.insert(name + "." + member.key);
  }
  root_[name] = std::move(section);
}

void Document::apply(const std::string& assignment, const PathRule& whole_path) {
  const std::string label = fmt::format("{}: --set {}", name_, printable(assignment));
  const auto refuse = [&](const std::string& message) { fail_with(label + ": " + message); };
  if (text::find_not_utf8(assignment) != std::string::npos) fail_with(name_ + ": --set: not UTF-8");
  const auto equals = assignment.find('=');
  if (equals == std::string::npos) {
    refuse("expected path=value, such as optimizer.params.lr=3e-4");
  }
  // Removes spaces around '='.
  std::string path = assignment.substr(0, equals);
  path.erase(path.find_last_not_of(' ') + 1);
  const bool spaced = path.size() < equals;
  if (whole_path) path = whole_path(path, refuse);
  const std::string origin = "--set " + printable(assignment);
  Json* node = &root_;
  for (std::size_t start = 0;;) {
    const std::size_t dot = std::min(path.find('.', start), path.size());
    const std::string key = path.substr(start, dot - start);
    if (key.empty()) refuse("the path has an empty part");
    if (node->is_null()) {
      *node = Json::object();
      origins_[path.substr(0, start - 1)] = origin;
    }
    if (!node->is_object()) {
      refuse(
          fmt::format("'{}' is {}, not a section", path.substr(0, start - 1), node->described()));
    }
    node = &(*node)[key];
    if (dot == path.size()) break;
    start = dot + 1;
  }
  const std::size_t begin = spaced ? assignment.find_first_not_of(' ', equals + 1) : equals + 1;
  const std::string value = begin == std::string::npos ? "" : assignment.substr(begin);
  *node = text::is_json(value) ? text::parse_json(value, label) : Json(value);
  origins_[path] = origin;
}

}  // namespace ballast::config
