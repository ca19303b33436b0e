#include "ballast/config/resumption.h"

#include <algorithm>
#include <array>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ballast/core/error.h"
#include "ballast/core/suggest.h"
#include "ballast/text/words.h"

#include "src/config/sections.h"

namespace ballast::config {
namespace {

constexpr KeyRole kMathematics = KeyRole::mathematics;
constexpr KeyRole kPosition = KeyRole::position;
constexpr KeyRole kFree = KeyRole::free;

/// Keys of one role, separated by spaces: "section.*" is for the keys that no other word names.
struct RoleKeys {
  KeyRole role;
  std::string_view keys;
};

/// Every key is in one of these lists. States replace the initial weights, tiles are compared block
/// by block, and files by their content, for which DataSection::kind() is the key in a checkpoint.
constexpr auto kRoles = std::to_array<RoleKeys>({
    {kMathematics,
     "model.* data.text data.tokens data.documents data.pairs data.held_out data.shuffle "
     "optimizer.type optimizer.params.* scheduler.type scheduler.params.* gradient_clipping "
     "bf16.enabled fp16.* zero_optimization.zero_quantized_weights ballast.train "
     "ballast.adapters ballast.adapters.* ballast.preference.* ballast.quantized_base "
     "ballast.double_quantization ballast.expert_updates ballast.optimizer_states "
     "ballast.weight_decay_exclude ballast.seed ballast.spike.*"},
    {kPosition, "data.sequence_length train_batch_size"},
    {kFree,
     "model.weights model.init_stddev model.vocabulary_tiles model.layer_tiles "
     "data.token_type data.eval data.as_is train_micro_batch_size_per_gpu "
     "gradient_accumulation_steps sequence_parallel_size tensor_parallel.autotp_size "
     "activation_checkpointing.* "
     "steps_per_print tensorboard.* "
     "csv_monitor.* "
     "zero_optimization.stage zero_optimization.stage3_param_persistence_threshold "
     "zero_optimization.zero_hpz_partition_size zero_optimization.sub_group_size "
     "zero_optimization.offload_optimizer.* zero_optimization.offload_param.* aio.* "
     "pipeline.stages ballast.device ballast.devices ballast.kernels ballast.gpu_checks "
     "ballast.attention "
     "ballast.product_algorithms ballast.device_bytes ballast.host_bytes ballast.adapters.path "
     "ballast.order ballast.update "
     "ballast.speculative_updates ballast.expert_prefetch ballast.expert_parallel "
     "ballast.serial ballast.nvtx ballast.delay_seed ballast.activations ballast.gradients "
     "ballast.recompute ballast.device_weight_buffers ballast.device_gradient_buffers "
     "ballast.activation_buffers ballast.gradient_buffers ballast.compute_threads "
     "ballast.update_threads ballast.update_isa ballast.update_numa_node ballast.link_gbps "
     "ballast.placement ballast.steps ballast.eval_every ballast.eval_batches "
     "ballast.save_weights ballast.checkpoint_every ballast.checkpoint_keep "
     "ballast.max_skipped_steps ballast.on_error ballast.comm_timeout_seconds ballast.out"},
});

struct KeyRow {
  std::string_view path;
  KeyRole role;
};

const std::vector<KeyRow>& rows() {
  static const std::vector<KeyRow> all = [] {
    std::vector<KeyRow> list;
    for (const auto& [role, keys] : kRoles) {
      for (const auto key : text::words_of(keys)) list.push_back({key, role});
    }
    return list;
  }();
  return all;
}

constexpr std::string_view kAll = "all";
constexpr std::array<std::string_view, 4> kKinds = {"data.text", "data.tokens", "data.documents",
                                                    "data.pairs"};

bool is_in(std::string_view key, std::string_view section) {
  return key.size() > section.size() && key.starts_with(section) && key[section.size()] == '.';
}

/// The row of a key, or null.
const KeyRow* row_of(std::string_view path) {
  const KeyRow* found = nullptr;
  for (const KeyRow& row : rows()) {
    if (row.path == path) return &row;
    const bool section = row.path.ends_with(".*");
    if (section && is_in(path, row.path.substr(0, row.path.size() - 2))) found = &row;
  }
  return found;
}

/// Whether the table has rows of keys in `path`.
bool is_section(std::string_view path) {
  return std::any_of(rows().begin(), rows().end(),
                     [path](const KeyRow& row) { return is_in(row.path, path); });
}

void add_settings(const Json& value, const std::string& path, Settings& settings) {
  if (!value.is_object() || !(path.empty() || is_section(path))) {
    settings.emplace(path, value.compact());
    return;
  }
  for (const auto& member : value.members()) {
    add_settings(member.value, path.empty() ? member.key : path + "." + member.key, settings);
  }
}

/// The names for --allow-change that cover `keys`: a section if several of its keys are among them.
std::vector<std::string> shortest_names(const std::vector<std::string>& keys) {
  std::vector<std::string> names;
  for (const std::string& key : keys) {
    const std::string section = key.substr(0, key.find('.'));
    const auto inside = [&section](const std::string& other) { return is_in(other, section); };
    const bool several = section != "ballast" && section != "zero_optimization" &&
                         std::count_if(keys.begin(), keys.end(), inside) > 1;
    const std::string& name = several ? section : key;
    if (names.empty() || names.back() != name) names.push_back(name);
  }
  return names;
}

/// Keys and sections that can be allowed.
std::vector<std::string> allowed_names() {
  std::vector<std::string> names = {std::string(kAll)};
  for (const KeyRow& row : rows()) {
    if (row.role != kMathematics) continue;
    std::string_view path = row.path;
    if (path.ends_with(".*")) path.remove_suffix(2);
    for (; true; path = path.substr(0, path.rfind('.'))) {
      // "ballast" as a whole cannot be allowed.
      if (path != "ballast" && path != "zero_optimization") names.emplace_back(path);
      if (path.find('.') == std::string_view::npos) break;
    }
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

}  // namespace

KeyRole role_of(std::string_view path) {
  const KeyRow* const row = row_of(path);
  expects(row != nullptr, "config: a key has no row in the table of what may change on a resume");
  return row->role;
}

Settings all_settings(const Config& config) {
  Config copy = config;  // the key table needs mutable fields
  Settings settings;
  add_settings(write_section(all_keys(copy)), "", settings);
  return settings;
}

Settings settings_of(const Config& config) {
  Settings settings = all_settings(config);
  const auto omitted = [&config](const auto& setting) {
    const std::string& key = setting.first;
    if (std::find(kKinds.begin(), kKinds.end(), key) != kKinds.end()) return true;
    // Keys without effect.
    if (is_in(key, "fp16")) return config.type != DType::f16 && key != "fp16.enabled";
    if (key == kPadTokenSetting) return setting.second == "null";
    if (is_in(key, "ballast.preference")) return config.data.pairs.empty();
    if (is_in(key, "ballast.spike") && key != "ballast.spike.action") {
      return config.ballast.spike.action == SpikeSection::Action::off;
    }
    return role_of(key) == kFree;
  };
  std::erase_if(settings, omitted);
  return settings;
}

std::vector<Change> find_changes(const Settings& before, const Settings& now) {
  std::vector<Change> changes;
  for (const auto& [key, value] : before) {
    const auto found = now.find(key);
    if (found == now.end()) {
      changes.push_back({key, value, "none"});
    } else if (found->second != value) {
      changes.push_back({key, value, found->second});
    }
  }
  return changes;
}

void check_allowed_names(const std::vector<std::string>& names) {
  const std::vector<std::string> known = allowed_names();
  for (const std::string& name : names) {
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    const KeyRow* const row = row_of(name);
    if (row != nullptr && row->role == kMathematics) continue;  // a key of "model.*"
    const auto refuse = [&name](const std::string& why) {
      throw Error(ErrorCategory::usage, fmt::format("--allow-change {}: {}", name, why));
    };
    if (row != nullptr && row->role == kFree) refuse("may change without this; remove it");
    if (row != nullptr) refuse("cannot change, because the position in the data follows from it");
    refuse(fmt::format("there is no such key of results{}", did_you_mean(name, known)));
  }
}

bool is_allowed(const std::string& key, const std::vector<std::string>& allowed) {
  return std::any_of(allowed.begin(), allowed.end(), [&key](const std::string& name) {
    return name == kAll || name == key || is_in(key, name);
  });
}

void refuse_changes(const std::vector<Change>& changes, const std::vector<std::string>& allowed,
                    const std::string& from) {
  std::vector<std::string> texts;
  std::vector<std::string> positions;
  std::vector<std::string> refused;
  for (const Change& change : changes) {
    texts.push_back(change.text());
    const KeyRow* const row = row_of(change.key);
    if (row != nullptr && row->role == kPosition) {
      positions.push_back(change.key);
    } else if (!is_allowed(change.key, allowed)) {
      refused.push_back(change.key);
    }
  }
  if (positions.empty() && refused.empty()) return;
  std::string advice = "set them to those of the checkpoint";
  if (!refused.empty()) {
    advice += fmt::format(", or accept them with --allow-change {}",
                          fmt::join(shortest_names(refused), " --allow-change "));
  }
  if (!positions.empty()) {
    advice += fmt::format("; the position in the data follows from {}, which cannot change",
                          fmt::join(positions, " and "));
  }
  throw Error(ErrorCategory::config,
              fmt::format("{}: the config changes what the run computes: {}; {}", from,
                          fmt::join(texts, ", "), advice));
}

}  // namespace ballast::config
