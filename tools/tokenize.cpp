#include "ballast/train/tokenize.h"

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/units.h"

#include "tools/command_line.h"
#include "tools/commands.h"
#include "tools/ending_notice.h"
#include "tools/process.h"

namespace ballast::tools {
namespace {

struct TokenizeArguments {
  std::vector<std::string> texts;
  std::filesystem::path out;
};

void run_tokenize(const TokenizeArguments& arguments) {
  announce_ending("tokenizing ends and removes what it has written");
  config::DataSection data;
  data.text = arguments.texts;
  const auto source = train::TokenSource::open(data, 256);
  train::write_tokens(source, arguments.out, &interrupted());
  fmt::print("{}: {} tokens (u16) from {} file{}\n", arguments.out.string(), source.size(),
             source.files().size(), source.files().size() == 1 ? "" : "s");
}

}  // namespace

void add_tokenize(Command program) {
  auto arguments = std::make_shared<TokenizeArguments>();
  Command command =
      program.add_command("tokenize", "Turn text into a token file, one token per byte");
  command.add_option("TEXT", &arguments->texts, "Files, folders or globs", {.required = true});
  command.add_option("--out", &arguments->out, "Token file to write (.bin, 16-bit little-endian)",
                     {.required = true});
  command.set_action([arguments] { run_tokenize(*arguments); });
}

}  // namespace ballast::tools
