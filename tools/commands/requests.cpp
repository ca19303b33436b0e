#include "tools/commands/requests.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <ctime>
#include <system_error>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ballast/core/error.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

#include "src/train/run_inputs.h"

namespace ballast::tools {

std::string option(Caller caller, const std::string& name, const std::string& value) {
  if (caller == Caller::program) return "--" + name + (value.empty() ? "" : " " + value);
  return name + "=" + value;
}

void refuse_other_kind(const std::filesystem::path& file, formats::Settings wanted,
                       const Error& error) {
  std::error_code ignored;
  const bool read =
      error.category() == ErrorCategory::config && std::filesystem::is_regular_file(file, ignored);
  const std::string cause = read ? formats::explain_other_settings(file, wanted) : "";
  if (!cause.empty()) throw Error(ErrorCategory::config, cause);
}

namespace {

/// Whether the config of `request` or an override gives the length of a sequence.
bool gives_length(const ConfigRequest& request) {
  const auto names_it = [](const std::string& setting) {
    return setting.starts_with("data.sequence_length=");
  };
  if (std::any_of(request.overrides.begin(), request.overrides.end(), names_it)) return true;
  std::error_code ignored;
  const bool readable = request.text || std::filesystem::is_regular_file(request.file, ignored);
  if (!readable) return true;  // a pipe can be read only once
  const text::Json json =
      text::parse_json(request.text ? *request.text : text::read_settings(request.file, "config"),
                       request.file.string(), {.comments = true, .non_finite = true});
  const text::Json* const data = json.is_object() ? json.find("data") : nullptr;
  return data != nullptr && data->is_object() && data->find("sequence_length") != nullptr;
}

/// The overrides of `request`, after those that its inputs make.
std::vector<std::string> all_overrides(const ConfigRequest& request) {
  std::vector<std::string> all = train::data_overrides(request.data);
  if (!request.model.empty()) {
    const std::string path = std::filesystem::absolute(request.model).string();
    all.push_back(fmt::format("model.path={}", text::Json(path).compact()));
  }
  std::uint64_t length = request.sequence_length;
  if (length == 0 && !request.model.empty() && !gives_length(request)) {
    length = train::usual_length(request.model);
  }
  if (length > 0) all.push_back(fmt::format("data.sequence_length={}", length));
  all.insert(all.end(), request.overrides.begin(), request.overrides.end());
  return all;
}

}  // namespace

void add_inputs(Command& command, ConfigRequest& request) {
  command.add_option("--model", &request.model,
                     "Hugging Face folder of the model; overrides model.path",
                     {.takes = Names::folder});
  command.add_option(
      "--data", &request.data,
      "Training data: documents or pairs (.safetensors), tokens (.bin, .npy) or text; overrides "
      "data.documents, data.pairs, data.tokens and data.text",
      {.takes = Names::path, .extensions = {".safetensors", ".bin", ".npy", ".txt"}});
  command.add_option("--sequence-length", &request.sequence_length,
                     "Tokens per sequence; overrides data.sequence_length (default with --model: "
                     "the model's longest, at most 4096)",
                     {.positive = true});
  command.add_option("--set", &request.overrides, "Override a key: path.to.key=value",
                     {.single_argument = true, .takes = Names::setting});
}

config::Config ConfigRequest::load(std::uint32_t world) const {
  const std::vector<std::string> overrides = all_overrides(*this);
  if (!text) {
    try {
      return config::load(file, overrides, world);
    } catch (const Error& error) {
      refuse_other_kind(file, formats::Settings::config, error);
      throw;
    }
  }
  return config::parse(*text, std::filesystem::current_path(), file.string(), overrides, world);
}

void log_notes(const config::Config& config) {
  std::vector<std::string> paths;
  for (const std::string& line : config.ignored) {
    log(LogLevel::debug, "ignored: " + line);
    paths.push_back(line.substr(0, line.find(": ")));
  }
  if (!paths.empty()) {
    log(LogLevel::info,
        fmt::format("ignored: {} (no effect in Ballast; -v and configs/keys.md say why)",
                    fmt::join(paths, ", ")));
  }
  for (const std::string& line : config.notes) log(LogLevel::info, line);
}

namespace {

/// $XDG_STATE_HOME/ballast, its default location, or /var/tmp for users without a home.
std::filesystem::path state_home() {
  if (const char* state = std::getenv("XDG_STATE_HOME"); state != nullptr && *state == '/') {
    return std::filesystem::path(state) / "ballast";
  }
  if (const char* home = std::getenv("HOME"); home != nullptr && *home == '/') {
    return std::filesystem::path(home) / ".local/state/ballast";
  }
  return "/var/tmp/ballast";
}

}  // namespace

std::filesystem::path default_run_directory(const std::filesystem::path& config) {
  const std::time_t now = std::time(nullptr);
  std::tm local = {};
  localtime_r(&now, &local);
  std::array<char, 32> stamp{};
  std::strftime(stamp.data(), stamp.size(), "%Y%m%d-%H%M%S", &local);
  return state_home() / fmt::format("{}-{}", config.stem().string(), stamp.data());
}

std::filesystem::path create_run_directory(const std::filesystem::path& config) {
  const auto base = default_run_directory(config);
  auto directory = base;
  std::error_code error;
  std::filesystem::create_directories(base.parent_path(), error);
  for (int i = 2; !error; ++i) {
    // If it is false without an error, another run was faster.
    if (std::filesystem::create_directory(directory, error)) return directory;
    if (error == std::errc::file_exists) error.clear();
    directory = fmt::format("{}-{}", base.string(), i);
  }
  throw Error(ErrorCategory::io,
              fmt::format("cannot create a run directory in {}; choose one with --out",
                          base.parent_path().string()),
              error.value());
}

}  // namespace ballast::tools
