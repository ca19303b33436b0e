#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/units.h"
#include "ballast/data/tokens.h"

#include "tools/command_line.h"
#include "tools/console/terminal.h"
#include "tools/signals.h"

namespace ballast::tools {
namespace {

struct TokenizeArguments {
  std::vector<std::string> texts;
  std::filesystem::path out;
  bool overwrite = false;
};

void run_tokenize(const TokenizeArguments& arguments) {
  announce_ending("tokenizing ends and removes what it has written");
  config::DataSection data;
  data.text = arguments.texts;
  const auto source = data::TokenSource::open(data, 256);
  // Token files have no header that identifies them.
  data::write_tokens(source, arguments.out,
                     {.kind = "a token file",
                      .begins = "",
                      .overwrite = arguments.overwrite,
                      .inputs = source.files()},
                     &interrupted());
  fmt::print("{}: {} tokens (u16) from {} file{}\n", arguments.out.string(), source.size(),
             source.files().size(), source.files().size() == 1 ? "" : "s");
}

}  // namespace

void add_tokenize(Command program) {
  auto arguments = std::make_shared<TokenizeArguments>();
  Command command =
      program.add_command("tokenize", "Turn text into a token file, one token per byte");
  command.add_option("TEXT", &arguments->texts, "Files, folders or globs",
                     {.required = true, .takes = Names::path});
  command.add_option("--out", &arguments->out, "Token file to write (.bin, 16-bit little-endian)",
                     {.required = true, .takes = Names::new_path, .value = "FILE"});
  command.add_flag("--overwrite", &arguments->overwrite, "Replace the file that --out names");
  command.set_action([arguments] { run_tokenize(*arguments); });
}

}  // namespace ballast::tools
