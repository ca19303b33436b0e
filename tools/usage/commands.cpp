#include "tools/commands.h"

#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "ballast/config/key_list.h"
#include "ballast/core/build_info.h"

#include "tools/command_line.h"
#include "tools/console/terminal.h"
#include "tools/usage/completion.h"
#include "tools/usage/config_keys.h"

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
