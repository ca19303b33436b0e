#include "tools/usage/config_keys.h"

#include <algorithm>
#include <cctype>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ballast/config/key_list.h"
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

/// Removes "see [below](#place)", which leads to a section of the page, with the mark before it.
void remove_pointer(std::string& text) {
  for (const std::string_view word : {"below", "above"}) {
    const std::size_t found = text.find(fmt::format("ee [{}](", word));
    if (found == std::string::npos) continue;
    const std::size_t link = found - 1;  // "see" or "See"
    const std::size_t end = text.find(')', link);
    const std::size_t before = text.find_last_not_of(",;. ", link == 0 ? 0 : link - 1);
    const std::size_t begin = before == std::string::npos ? 0 : before + 1;
    text.erase(begin, end + 1 - begin);
  }
}

/// The text of a cell without Markdown.
std::string plain(std::string_view cell) {
  std::string text(cell);
  remove_pointer(text);
  for (std::size_t link = text.find("]("); link != std::string::npos; link = text.find("](")) {
    const std::size_t end = text.find(')', link);
    text.erase(link, end + 1 - link);
    text.erase(text.rfind('[', link), 1);
  }
  std::erase(text, '`');
  std::erase(text, '\\');  // before a bar
  const std::size_t first = text.find_first_not_of(" ,;");
  if (first == std::string::npos) return "";
  return text.substr(first, text.find_last_not_of(" ,;") + 1 - first);
}

std::string cell(std::string_view text) {
  return text.empty() ? " " : fmt::format(" {} ", text);
}

std::vector<KeyPage> matches(const std::vector<std::string>& words) {
  std::vector<KeyPage> by_path;
  std::vector<KeyPage> by_meaning;
  for (const KeyPage& key : key_pages()) {
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
  for (const KeyPage& key : key_pages()) {
    names.push_back(key.path);
    names.push_back(key.path.substr(key.path.rfind('.') + 1));
  }
  return words.size() == 1 ? did_you_mean(words.front(), names) : "";
}

}  // namespace

std::vector<KeyPage> key_pages() {
  std::vector<KeyPage> pages;
  for (const config::KeyInfo& key : config::key_rows()) {
    if (key.text.meaning.empty()) continue;
    pages.push_back(
        {key.path, plain(key.text.meaning), plain(key.text.initial), plain(key.text.range)});
  }
  return pages;
}

std::string key_table(const std::vector<std::string>& sections) {
  const std::vector<config::KeyInfo> rows = config::key_rows();
  std::string table;
  for (const std::string& section : sections) {
    for (const config::KeyInfo& key : rows) {
      const std::size_t dot = key.path.find('.');
      const std::string own = dot == std::string::npos ? "top" : key.path.substr(0, dot);
      const auto& [meaning, initial, range] = key.text;
      if (own != section || meaning.empty()) continue;
      table +=
          fmt::format("| `{}` |{}|{}|{}|\n", key.path, cell(meaning), cell(initial), cell(range));
    }
  }
  return table;
}

std::string config_keys_page(const std::vector<std::string>& words, std::size_t width) {
  const std::vector<KeyPage> found = matches(words);
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
  for (const KeyPage& key : found) {
    if (!page.empty()) page += "\n";
    page += fmt::format("{}\n", key.path);
    add("", key.meaning);
    add("default: ", key.initial);
    add("range: ", key.range);
  }
  return page;
}

}  // namespace ballast::tools
