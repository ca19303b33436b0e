#include "tools/usage/hints.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <span>
#include <string_view>
#include <system_error>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ballast/config/key_list.h"
#include "ballast/text/words.h"

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
    {"tools/prepare.py makes documents from conversations, ballast tokenize token files from plain "
     "text",
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
  constexpr std::size_t kMost = 3;
  const std::vector<std::string> keys = keys_called(name);
  if (keys.empty() || keys.size() > kMost) return "";
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
  constexpr std::size_t kMost = 3;
  if (owners.empty()) return "";
  if (owners.size() > kMost) return "only other commands have it";
  return fmt::format("it is an option of {}", fmt::join(owners, ", "));
}

}  // namespace ballast::tools
