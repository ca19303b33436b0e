#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <span>
#include <string_view>
#include <system_error>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ballast/config/hugging_face_config.h"
#include "ballast/config/key_effects.h"
#include "ballast/core/error.h"
#include "ballast/text/json.h"

#include "tools/usage/words.h"

namespace ballast::tools {

namespace {

/// Advice on words, which are separated by spaces.
struct Advice {
  std::string_view advice;
  std::string_view words;
};

constexpr auto kCommands = std::to_array<Advice>({
    {"to train a model: ballast train CONFIG",
     "run start fit finetune fine-tune launch resume sft dpo lora"},
    {"to compute a loss: ballast eval PATH",
     "evaluate evaluation test validate perplexity ppl loss"},
    {"to list the content of a model or a run: ballast inspect PATH",
     "info show ls list verify checkpoints cat"},
    {"to predict memory and speed: ballast plan CONFIG",
     "predict estimate simulate memory dry-run dryrun fits"},
    {"to write the model of a run: ballast export RUN --out DIR", "convert save merge push upload"},
    {"to draw a run: ballast report RUN", "watch plot html dashboard draw compare"},
    {"to measure this machine: ballast bench", "benchmark measure speed"},
    {"tools/prepare.py (`ballast prepare` of the Python package) makes documents from "
     "conversations, "
     "ballast tokenize token files from plain text",
     "prepare preprocess data dataset tokenise"},
    {"a model that `ballast export` has written runs in other programs, such as transformers; "
     "Ballast only trains and evaluates",
     "generate chat serve infer inference predict-text"},
    {"ballast --version", "version"},
});

constexpr std::string_view kOneConfig = "give only the DeepSpeed config: ballast train CONFIG";
constexpr std::string_view kRanks =
    "one process trains on one device; for several: mpirun -n N --bind-to none ballast train "
    "CONFIG";

/// Options of DeepSpeed's, torch's and accelerate's launchers, without dashes.
constexpr auto kLaunchers = std::to_array<Advice>({
    {kOneConfig, "deepspeed deepspeed_config ds_config config config_file cfg c"},
    {kRanks,
     "num_gpus num_nodes nproc_per_node nproc nnodes node_rank local_rank local_world_size "
     "world_size rank master_addr master_port hostfile include exclude launcher num_processes "
     "num_machines machine_rank gpus gpu_ids multi_gpu rdzv_backend rdzv_endpoint rdzv_id "
     "standalone max_restarts use_deepspeed zero_stage main_process_port main_process_ip np ranks"},
});

/// Keys of the config, and the names that Trainer, TRL or common usage have for them.
constexpr auto kNames = std::to_array<Advice>({
    {"optimizer.params.lr", "learning_rate"},
    {"train_micro_batch_size_per_gpu", "per_device_train_batch_size micro_batch_size micro_batch"},
    {"train_batch_size", "batch_size global_batch_size"},
    {"ballast.steps", "epochs num_train_epochs"},
    {"data.sequence_length", "max_length max_seq_length"},
    {"model.path", "model model_name_or_path"},
    {"data.documents", "data dataset train_file"},
    {"gradient_clipping", "max_grad_norm grad_clip"},
    {"scheduler.params.warmup_num_steps", "warmup_steps warmup"},
    {"zero_optimization.offload_optimizer.nvme_path", "nvme_path"},
    {"zero_optimization.offload_optimizer.device", "offload"},
    {"bf16.enabled", "bf16"},
    {"fp16.enabled", "fp16"},
    {"zero_optimization.stage", "zero"},
    {"optimizer.type", "optim"},
    {"scheduler.type", "lr_scheduler_type"},
    {"ballast.adapters", "lora"},
});

/// `name` without leading dashes, and with '_' between its words as in configs.
std::string plain_word(const std::string& name) {
  std::string text = name.substr(std::min(name.find_first_not_of('-'), name.size()));
  std::replace(text.begin(), text.end(), '-', '_');
  return text;
}

/// The advice on `word`, which has no spaces; "" if there is none.
std::string_view advice_for(std::span<const Advice> table, const std::string& word) {
  for (const auto& [advice, words] : table) {
    if (text::has_word(words, word)) return advice;
  }
  return "";
}

bool has_settings(const CommandInfo& command) {
  return std::any_of(command.options.begin(), command.options.end(),
                     [](const OptionInfo& option) { return option.takes == Names::setting; });
}

/// Keys that `name` may stand for: a whole path, the last part of one, or another program's name.
std::vector<std::string> keys_called(const std::string& name) {
  if (const auto key = advice_for(kNames, name); !key.empty()) return {std::string(key)};
  std::vector<std::string> found;
  for (const config::KeyInfo& key : config::key_list()) {
    if (key.path == name) return {key.path};
    const auto& others = key.other_names;
    const bool other = std::find(others.begin(), others.end(), name) != others.end();
    if (other || key.path.ends_with("." + name)) found.push_back(key.path);
  }
  return found;
}

std::string key_hint(const std::string& name) {
  constexpr std::size_t kMax = 3;
  const std::vector<std::string> keys = keys_called(name);
  if (keys.empty() || keys.size() > kMax) return "";
  return fmt::format("it is a key of the config: --set {}=VALUE",
                     fmt::join(keys, "=VALUE or --set "));
}

void add_owners(const CommandInfo& command, const std::string& name,
                std::vector<std::string>& owners) {
  if (command.option(name) != nullptr) owners.push_back(command.path);
  for (const CommandInfo& one : command.commands) add_owners(one, name, owners);
}

}  // namespace

std::string command_hint(const std::string& word) {
  std::error_code ignored;
  const std::filesystem::path path(word);
  if (path.extension() == ".json") return fmt::format("; to train: ballast train {}", word);
  if (std::filesystem::is_directory(path, ignored)) {
    return fmt::format("; to list the content of a folder: ballast inspect {}", word);
  }
  std::string lower = word;
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  const std::string_view advice = advice_for(kCommands, lower);
  return advice.empty() ? "" : fmt::format("; {}", advice);
}

std::string option_hint(const CommandInfo& program, const CommandInfo& command,
                        const std::string& name) {
  const std::string word = plain_word(name);
  if (const auto advice = advice_for(kLaunchers, word); !advice.empty()) {
    return std::string(advice);
  }
  constexpr std::string_view kData =
      "data.documents data.text data.tokens documents text tokens dataset train_file";
  if (command.option("--data") != nullptr && text::has_word(kData, word)) {
    return "give the file with --data FILE";
  }
  if (has_settings(command)) {
    if (const std::string hint = key_hint(word); !hint.empty()) return hint;
  }
  std::vector<std::string> owners;
  add_owners(program, name, owners);
  constexpr std::size_t kMax = 3;
  if (owners.empty()) return "";
  if (owners.size() > kMax) return "only other commands have it";
  return fmt::format("it is an option of {}", fmt::join(owners, ", "));
}

namespace {

namespace fs = std::filesystem;

bool there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

/// Returns " (did you mean 'config.json'?)" with a name similar to the missing one, or "".
std::string similar_name(const fs::path& missing) {
  constexpr std::size_t kMax = 4096;
  const fs::path folder = missing.has_parent_path() ? missing.parent_path() : ".";
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), none;
       !error && entry != none && names.size() < kMax; entry.increment(error)) {
    names.push_back((missing.parent_path() / entry->path().filename()).string());
  }
  const std::string near = nearest(missing.string(), names);
  return near.empty() ? "" : fmt::format(" (did you mean '{}'?)", near);
}

std::string missing_path(Names takes, const std::string& text) {
  const fs::path path(text);
  if (const char* home = std::getenv("HOME"); home != nullptr && text.starts_with("~/")) {
    const fs::path expanded = fs::path(home) / text.substr(2);
    if (there(expanded)) {
      return fmt::format("{}: the shell does not expand ~ in quotes; give {}", text,
                         expanded.string());
    }
  }
  for (fs::path part = path.parent_path(); !part.empty() && part != part.root_path();
       part = part.parent_path()) {
    std::error_code ignored;
    if (there(part) && !fs::is_directory(part, ignored)) {
      return fmt::format("{}: {} is a file, not a folder", text, part.string());
    }
  }
  const char* const kind = takes == Names::file     ? "file"
                           : takes == Names::folder ? "directory"
                                                    : "file or folder";
  const std::string near = similar_name(path);
  const std::string hint =
      takes == Names::model && near.empty() ? config::download_hint(text) : std::string();
  return fmt::format("{}: no such {}{}{}", text, kind, near, hint.empty() ? "" : ". " + hint);
}

std::string folder_for_file(const std::string& text) {
  const fs::path folder(text);
  if (there(folder / "run.json") && there(folder / "config.json")) {
    return fmt::format("{} is the directory of a run, not a file; its config is {}", text,
                       (folder / "config.json").string());
  }
  if (there(folder / "config.json")) {
    return fmt::format("{} is the folder of a model, not a file; a config names it as model.path",
                       text);
  }
  return fmt::format("{} is a directory; give a file", text);
}

std::string file_for_folder(const std::string& text) {
  const fs::path folder = fs::path(text).parent_path();
  const bool of_run = there(folder / "run.json");
  return fmt::format("{} is not a directory; give {}", text, of_run ? folder.string() : "one");
}

/// Missing folders are made, or refused by the command.
std::string mistake_in_new(Names takes, const fs::path& path) {
  std::error_code error;
  if (takes == Names::new_folder && there(path) && !fs::is_directory(path, error)) {
    return fmt::format("{} is a file, not a folder; choose another", path.string());
  }
  for (fs::path place = path.parent_path(); !place.empty(); place = place.parent_path()) {
    const fs::file_status status = fs::status(place, error);
    if (fs::is_directory(status) || status.type() == fs::file_type::none) return "";
    if (fs::exists(status)) {
      return fmt::format("{}: {} is a file, not a folder", path.string(), place.string());
    }
  }
  return "";
}

std::string mistake(Names takes, const std::string& path) {
  if (takes == Names::new_path || takes == Names::new_folder) return mistake_in_new(takes, path);
  const bool reads = takes == Names::file || takes == Names::folder || takes == Names::path ||
                     takes == Names::model;
  if (!reads || path.empty() || path.find_first_of("*?[") != std::string::npos) return "";
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (status.type() == fs::file_type::not_found) {
    // Throws if the working directory was deleted, which main_program() reports.
    if (fs::path(path).is_relative()) static_cast<void>(fs::current_path());
    return missing_path(takes, path);
  }
  // If the permission to look at it is missing, the reader reports that.
  if (status.type() == fs::file_type::none) return "";
  const bool folder = fs::is_directory(status);
  if (takes == Names::file && folder) return folder_for_file(path);
  return takes == Names::folder && !folder ? file_for_folder(path) : "";
}

}  // namespace

std::string path_mistake(Names takes, const std::string& path) {
  constexpr std::size_t kLongest = 8192;
  return text::printable(mistake(takes, path), kLongest);
}

namespace {

std::vector<std::string> long_names(const CommandInfo& command) {
  std::vector<std::string> names;
  for (const OptionInfo& option : command.options) {
    if (option.positional) continue;
    for (const std::string& name : option.names) {
      if (name.starts_with("--")) names.push_back(name);
    }
  }
  return names;
}

std::string without_dashes(std::string name) {
  name.erase(0, std::min(name.find_first_not_of('-'), name.size()));
  return name;
}

/// The only one of `words` that begins with `beginning` or equals it; otherwise "".
std::string only_one_from(const std::string& beginning, const std::vector<std::string>& words) {
  std::string found;
  for (const std::string& word : words) {
    if (word == beginning) return word;
    if (!word.starts_with(beginning)) continue;
    if (!found.empty()) return "";
    found = word;
  }
  return found;
}

/// The option of the command that is nearest to `name`; "" if none is near. Dashes are not
/// compared, since they would make short names look alike.
std::string near_option(const CommandInfo& command, const std::string& name) {
  const std::vector<std::string> known = long_names(command);
  std::vector<std::string> words;
  std::transform(known.begin(), known.end(), std::back_inserter(words), without_dashes);
  std::string word = without_dashes(name);
  std::replace(word.begin(), word.end(), '_', '-');
  constexpr std::size_t kShortest = 4;  // shorter words are near to any other
  std::string found = word.size() < kShortest ? only_one_from(word, words) : nearest(word, words);
  return found.empty() ? "" : "--" + found;
}

std::string unknown_option(const CommandInfo& program, const CommandInfo& command,
                           const std::string& word) {
  const std::string name = word.substr(0, word.find('='));
  const std::string message = fmt::format("{} has no option {}", command.path, name);
  const std::string near = near_option(command, name);
  const std::string hint = option_hint(program, command, name);
  // A hint is about exactly this word, so it takes precedence over a word that is only similar.
  const bool same = without_dashes(near) == without_dashes(name);
  if (!near.empty() && (same || hint.empty())) {
    return fmt::format("{} (did you mean '{}'?)", message, near);
  }
  return hint.empty() ? message : fmt::format("{}: {}", message, hint);
}

/// Text editors and web pages turn "--" into one of these characters.
constexpr std::array<std::string_view, 2> kLongDashes = {"\xe2\x80\x93", "\xe2\x80\x94"};

std::string excess_argument(const CommandInfo& command, const ReadWords& read) {
  const std::vector<std::string> extra(
      read.arguments.end() - static_cast<std::ptrdiff_t>(read.excess()), read.arguments.end());
  for (const std::string& word : extra) {
    for (const std::string_view dash : kLongDashes) {
      if (!word.starts_with(dash)) continue;
      return fmt::format("'{0}' begins with a long dash; write --{1}", word,
                         word.substr(dash.size()));
    }
  }
  const bool settings =
      std::any_of(command.options.begin(), command.options.end(),
                  [](const OptionInfo& option) { return option.takes == Names::setting; });
  if (settings && std::find(extra.begin(), extra.end(), "=") != extra.end()) {
    return "a setting is one word without spaces: --set KEY=VALUE";
  }
  if (settings && extra.front().find('=') != std::string::npos) {
    return fmt::format("a setting needs --set before it: --set {}", extra.front());
  }
  return fmt::format("{} takes no more arguments, got {}", command.path,
                     extra.front().empty() ? "''" : fmt::format("{}", fmt::join(extra, " ")));
}

/// Describes a mistake in how an option is given, apart from its value; "" if there is none.
std::string mistake_of(const ReadWords::GivenOption& given) {
  const OptionInfo& option = *given.option;
  if (option.flag && !option.optional_value()) {
    if (!given.attached || flag_value(given.values.front())) return "";
    return fmt::format("{} takes no value, got '{}'", given.name, given.values.front());
  }
  if (given.attached && given.values.front().empty()) {
    return fmt::format("{}=: must not be empty; give {}={}", given.name, given.name, option.value);
  }
  if (!option.flag && given.values.empty()) {
    return fmt::format("{} needs a value: {} {}", given.name, given.name, option.value);
  }
  return "";
}

/// Describes an option that is given twice but takes one value; "" if there is none.
std::string repetition(const ReadWords& read) {
  for (std::size_t i = 0; i < read.options.size(); ++i) {
    const ReadWords::GivenOption& later = read.options[i];
    if (later.option->flag || later.option->repeated || later.option->many) continue;
    for (std::size_t j = 0; j < i; ++j) {
      const ReadWords::GivenOption& earlier = read.options[j];
      if (earlier.option != later.option) continue;
      return fmt::format("{} is given twice ({} and {}); give it once", later.name,
                         earlier.values.front(), later.values.front());
    }
  }
  return "";
}

std::string missing(const CommandInfo& command, const ReadWords& read) {
  for (const OptionInfo& option : command.options) {
    if (!option.required || !read.values_of(option).empty()) continue;
    if (!option.positional) {
      return fmt::format("{} is missing; give {}", option.name(), option_text(option));
    }
    return fmt::format("{} is missing: {} {}", option.name(), command.path,
                       fmt::join(command.arguments(), " "));
  }
  return "";
}

std::string conflict(const CommandInfo& command, const ReadWords& read) {
  const auto given = [&](const std::string& name) {
    return !name.empty() && !read.values_of(*command.option(name)).empty();
  };
  for (const ReadWords::GivenOption& one : read.options) {
    const OptionInfo& option = *one.option;
    if (!option.needs.empty() && !given(option.needs)) {
      return fmt::format("{} is for {}; give both, or neither", option.name(), option.needs);
    }
    if (given(option.excludes)) {
      return fmt::format("{} and {} exclude each other; give one of them", option.name(),
                         option.excludes);
    }
  }
  return "";
}

/// Describes an unknown command or a missing subcommand; "" if neither is the case.
std::string command_mistake(const ReadWords& read) {
  const CommandInfo& command = *read.command;
  if (read.has_unknown_command) {
    const std::string hint = command_hint(read.unknown_command);
    return fmt::format(
        "'{}' is not a {} command{}", read.unknown_command, command.name,
        hint.empty() ? did_you_mean(read.unknown_command, command.command_names()) : hint);
  }
  if (!command.needs_command) return "";
  return fmt::format("{} needs a command: {}", command.path,
                     fmt::join(command.command_names(), ", "));
}

}  // namespace

std::string mistake_in(const CommandInfo& program, const ReadWords& read) {
  const CommandInfo& command = *read.command;
  if (asks_for_help(read)) return read.has_unknown_command ? command_mistake(read) : "";
  if (!read.unknown.empty()) return unknown_option(program, command, read.unknown.front());
  if (std::string wrong = command_mistake(read); !wrong.empty()) return wrong;
  for (const ReadWords::GivenOption& given : read.options) {
    if (std::string wrong = mistake_of(given); !wrong.empty()) return wrong;
  }
  if (std::string twice = repetition(read); !twice.empty()) return twice;
  if (read.excess() > 0) return excess_argument(command, read);
  if (std::string lacking = missing(command, read); !lacking.empty()) return lacking;
  return conflict(command, read);
}

}  // namespace ballast::tools
