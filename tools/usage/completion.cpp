#include "tools/usage/completion.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace ballast::tools {

std::string completed(const char* call, const OptionInfo& option, const CommandInfo& program) {
  const auto& ends = option.extensions;
  return fmt::format(
      fmt::runtime(call), fmt::arg("extensions", fmt::join(ends, " ")),
      fmt::arg("patterns",
               ends.empty() ? "" : fmt::format(" -g \"(*{})(-.)\"", fmt::join(ends, "|*"))),
      fmt::arg("files", ends.size() == 1
                            ? fmt::format("-a '(__fish_complete_suffix {})'", ends.front())
                            : "-F"),
      fmt::arg("commands", fmt::join(program.command_names(), " ")));
}

std::string short_description(const std::string& description) {
  constexpr std::size_t kShortest = 4;
  std::size_t end = description.size();
  for (const char* mark : {";", " (", ": ", ", for"}) {
    const std::size_t at = description.find(mark);
    if (at != std::string::npos && at >= kShortest) end = std::min(end, at);
  }
  return description.substr(0, end);
}

std::string shell_quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}

std::vector<const CommandInfo*> all_commands(const CommandInfo& program) {
  std::vector<const CommandInfo*> list = {&program};
  for (const CommandInfo& one : program.commands) {
    const auto inner = all_commands(one);
    list.insert(list.end(), inner.begin(), inner.end());
  }
  return list;
}

std::string command_patterns(const CommandInfo& program, const std::string& separator) {
  std::string text;
  for (const CommandInfo* const command : all_commands(program)) {
    if (command == &program) continue;
    text += (text.empty() ? "" : separator) + shell_quoted(command->path);
  }
  return text;
}

}  // namespace ballast::tools
