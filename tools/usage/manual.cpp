#include "tools/usage/manual.h"

#include <algorithm>
#include <cctype>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ballast/config/key_effects.h"
#include "ballast/core/error.h"
#include "ballast/core/machine.h"

#include "tools/command_line.h"
#include "tools/console/terminal.h"
#include "tools/signals.h"

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

/// Removes "see [tiles](memory.md#tiles)", which leads to a page of the manual, with the mark
/// before it.
void remove_pointers(std::string& text) {
  for (;;) {
    const std::size_t found = text.find("ee [");
    if (found == std::string::npos) return;
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
  remove_pointers(text);
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

namespace {

/// Date of the last change of the fixed text below.
constexpr const char* kDate = "2026-11-26";

constexpr const char* kDescription =
    R"(Ballast trains transformers that are larger than the memory of the
devices on which they train. Weights and optimizer states are kept on the
device, in host memory or on NVMe, block by block.
A config in JSON has DeepSpeed's keys and the sections model, data and ballast.
)";

constexpr const char* kEnvironment = R"(.TP
.B XDG_STATE_HOME
Runs without a run directory are written below its folder ballast
(default: ~/.local/state).
.TP
.B XDG_CACHE_HOME
Measured rates of this machine are kept below its folder ballast
(default: ~/.cache).
)";

constexpr const char* kExamples = R"(.TP
.B ballast plan finetune.json
Does it fit, how fast will it be, what would help. Nothing runs.
.TP
.B ballast train finetune.json \-\-set optimizer.params.lr=3e\-4 \-\-out run
Train, with one key of the config changed.
.TP
.B ballast train finetune.json \-\-out run \-\-resume
Continue from the latest checkpoint of the run.
.TP
.B mpirun \-n 4 \-\-bind\-to none ballast train finetune.json
Train on four devices.
.TP
.B ballast export run \-\-out tuned \-\-dtype bf16
Write the trained model as a Hugging Face folder.
)";

/// Converts text to troff, in lines of moderate length: dashes that can be copied, no line that
/// begins with a control character.
std::string troff(const std::string& text) {
  constexpr std::size_t kWidth = 72;
  std::string out;
  bool begins = true;
  for (const char c : wrap(text, kWidth, "")) {
    if (begins && (c == '.' || c == '\'')) out += "\\&";
    begins = c == '\n';
    out += c == '\\' ? "\\e" : c == '-' ? "\\-" : std::string(1, c);
  }
  return out;
}

std::string bold(const std::string& text) {
  return fmt::format("\\fB{}\\fR", troff(text));
}

std::string man_entry(const OptionInfo& option) {
  std::vector<std::string> names;
  for (auto name = option.names.rbegin(); name != option.names.rend(); ++name) {
    names.push_back(bold(*name));
  }
  std::string value;
  if (!option.value.empty() && !option.positional) {
    value = fmt::format("\\fI{}\\fR", troff(option.value));
    value = option.flag ? fmt::format("[={}]", value) : " " + value;
    if (option.commas) value += ",...";
  }
  return fmt::format(".TP\n{}{}\n{}\n", fmt::join(names, ", "), value,
                     troff(full_description(option)));
}

std::string section_of(const CommandInfo& command) {
  std::string text = fmt::format(".SS {}\n{} [\\fIOPTIONS\\fR]", troff(command.path.substr(8)),
                                 bold(command.path));
  for (const std::string& argument : command.arguments()) {
    text += fmt::format(" \\fI{}\\fR", troff(argument));
  }
  text += fmt::format("\n.PP\n{}.\n", troff(command.description));
  for (const OptionInfo& option : command.options) {
    if (option.name() != "--help") text += man_entry(option);
  }
  return text;
}

std::string keys_section(const std::vector<config::KeyInfo>& keys) {
  std::string text =
      "\\fBballast config\\-keys\\fR prints the meaning, default and range of each.\n";
  for (const config::KeyInfo& key : keys) {
    const std::string values = !key.values.empty() ? fmt::format("{}", fmt::join(key.values, ", "))
                               : key.names_paths   ? "path"
                                                   : "";
    text += values.empty() ? fmt::format(".br\n{}\n", bold(key.path))
                           : fmt::format(".br\n{}: {}\n", bold(key.path), troff(values));
  }
  return text;
}

}  // namespace

std::string man_page(const CommandInfo& program, const std::vector<config::KeyInfo>& keys,
                     const std::string& version) {
  std::string text =
      fmt::format(".TH BALLAST 1 {} \"ballast {}\" \"User Commands\"\n", kDate, version);
  text += ".SH NAME\nballast \\- train transformers that are larger than the device's memory\n";
  text += ".SH SYNOPSIS\n\\fBballast\\fR \\fICOMMAND\\fR [\\fIOPTIONS\\fR] [\\fIARGUMENTS\\fR]\n";
  text += std::string(".SH DESCRIPTION\n") + kDescription + ".SH OPTIONS\n";
  for (const OptionInfo& option : program.options) text += man_entry(option);
  text += ".SH COMMANDS\n";
  for (const CommandInfo* const command : all_commands(program)) {
    if (command->commands.empty()) text += section_of(*command);
  }
  text += std::string(".SH EXAMPLES\n") + kExamples + ".SH EXIT STATUS\n";
  for (const ExitStatus& status : kExitStatuses) {
    text += fmt::format(".TP\n{}\n{}\n", bold(status.number), troff(status.meaning));
  }
  text += std::string(".SH ENVIRONMENT\n") + kEnvironment + ".SH KEYS OF THE CONFIG\n" +
          keys_section(keys);
  return text;
}

}  // namespace ballast::tools

// Commands about the program itself.

namespace ballast::tools {

void add_help(Command program, const CommandLine& line) {
  auto subject = std::make_shared<std::vector<std::string>>();
  Command command = program.add_command("help", "Print the help of a command");
  command.add_option("COMMAND", subject.get(), "Command, with its subcommand",
                     {.takes = Names::command});
  command.set_action([subject, &line] { fmt::print("{}", line.help(*subject)); });
}

void add_completion(Command program, const CommandLine& line) {
  auto shell = std::make_shared<std::string>();
  Command command = program.add_command(
      "completion", "Print a script that completes commands, options and keys in a shell");
  command.add_option("SHELL", shell.get(), "The shell",
                     {.required = true, .choices = {"bash", "zsh", "fish"}});
  command.set_action([shell, &line] {
    const auto keys = config::key_list();
    fmt::print("{}", *shell == "bash"  ? bash_completion(line.table(), keys)
                     : *shell == "zsh" ? zsh_completion(line.table(), keys)
                                       : fish_completion(line.table(), keys));
  });
}

void add_man(Command program, const CommandLine& line) {
  Command command = program.add_command("man", "Print the manual page (ballast man | man -l -)");
  command.set_action([&line] {
    fmt::print("{}", man_page(line.table(), config::key_list(), std::string(version())));
  });
}

void add_config_keys(Command program) {
  auto words = std::make_shared<std::vector<std::string>>();
  Command command = program.add_command(
      "config-keys", "Print the meaning, default and range of the keys of a config");
  command.add_option("WORD", words.get(), "Only keys with these words in their names",
                     {.takes = Names::key});
  auto markdown = std::make_shared<bool>(false);
  command.add_flag(
      "--markdown", markdown.get(),
      "Print the rows of sections named WORD (\"top\": keys in no section) as a table");
  command.set_action([words, markdown] {
    if (*markdown) {
      fmt::print("{}", key_table(*words));
      return;
    }
    fmt::print("{}", config_keys_page(*words, Terminal(Terminal::available()).width()));
  });
}

}  // namespace ballast::tools
