#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tools/console/terminal.h"
#include "tools/usage/completion.h"
#include "tools/usage/exit_status.h"

namespace ballast::tools {
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
