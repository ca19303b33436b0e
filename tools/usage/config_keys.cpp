#include "tools/usage/config_keys.h"

#include <algorithm>
#include <cctype>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ballast/core/error.h"
#include "ballast/core/suggest.h"

#include "tools/console/terminal.h"

namespace ballast::tools {
namespace {

std::string in_lower_case(std::string_view text) {
  std::string lower(text);
  std::ranges::transform(lower, lower.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return lower;
}

bool has_all(std::string_view text, const std::vector<std::string>& words) {
  const std::string lower = in_lower_case(text);
  return std::ranges::all_of(words, [&](const std::string& word) {
    return lower.find(in_lower_case(word)) != std::string::npos;
  });
}

std::vector<KeyText> matches(const std::vector<std::string>& words) {
  std::vector<KeyText> by_path;
  std::vector<KeyText> by_meaning;
  for (const KeyText& key : key_texts()) {
    if (has_all(key.path, words)) {
      by_path.push_back(key);
    } else if (has_all(fmt::format("{} {}", key.path, key.meaning), words)) {
      by_meaning.push_back(key);
    }
  }
  return by_path.empty() ? by_meaning : by_path;
}

/// The key that the user may have meant: by its path, or by the last part of it.
std::string nearest_key(const std::vector<std::string>& words) {
  std::vector<std::string> names;
  for (const KeyText& key : key_texts()) {
    names.emplace_back(key.path);
    names.emplace_back(key.path.substr(key.path.rfind('.') + 1));
  }
  return words.size() == 1 ? did_you_mean(words.front(), names) : "";
}

}  // namespace

std::string config_keys_page(const std::vector<std::string>& words, std::size_t width) {
  const std::vector<KeyText> found = matches(words);
  if (found.empty()) {
    throw Error(ErrorCategory::usage,
                fmt::format("no key of the config has \"{}\" in its name or meaning{}; `ballast "
                            "config-keys` lists all keys",
                            fmt::join(words, " "), nearest_key(words)));
  }
  std::string page;
  const auto add = [&](std::string_view label, std::string_view text) {
    if (!text.empty()) page += wrap(fmt::format("{}{}", label, text), width, "    ") + "\n";
  };
  for (const KeyText& key : found) {
    if (!page.empty()) page += "\n";
    page += fmt::format("{}\n", key.path);
    add("", key.meaning);
    add("default: ", key.initial);
    add("range: ", key.range);
  }
  return page;
}

}  // namespace ballast::tools
