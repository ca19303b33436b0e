#include <algorithm>
#include <filesystem>
#include <vector>

#include <fmt/format.h>

#include "ballast/config/adapter_folder.h"
#include "ballast/config/hugging_face_config.h"
#include "ballast/config/stored_model.h"
#include "ballast/core/error.h"
#include "ballast/model/architecture.h"
#include "ballast/model/family.h"

#include "src/config/config_tree.h"
#include "src/config/key_table.h"
#include "src/model/description/layer_rules.h"

namespace ballast::config {
namespace {

void require(bool given, const Document& document, const std::string& path, std::string_view what) {
  if (!given) document.fail(path, fmt::format("missing; give {}", what));
}

void complete_model(Config& config, const Document& document) {
  model::ModelConfig& m = config.model;
  const std::uint64_t sequence_length = config.data.sequence_length;
  if (m.max_sequence == 0) m.max_sequence = sequence_length;
  const auto refuse = [&](std::string_view key, const std::string& rule) {
    refuse_model(config, document, key, rule);
  };
  // Placement rules name blocks, whose numbers depend on the tiles.
  const bool open = config.ballast.placement.empty();
  config.open_tiles = {.vocabulary = open && m.vocabulary_tiles == 0,
                       .layers = open && m.layer_tiles == 0};
  const model::ModelConfig given = m;
  model::complete(m, refuse, config.rank_split());
  note_unused_model_keys(config, given, document);
  check_stages(config, document);
  if (m.max_sequence < sequence_length) {
    document.fail("model.max_sequence", fmt::format("{} is shorter than data.sequence_length {}",
                                                    m.max_sequence, sequence_length));
  }
  const std::string obstacle = model::family(m.family).obstacle_to_length(m, sequence_length);
  if (!obstacle.empty()) document.fail("data.sequence_length", obstacle);
}

void check_data(const Config& c, const Document& document) {
  constexpr std::uint64_t kByteValues = 256;
  constexpr std::uint64_t kU16Values = 65536;
  const auto& d = c.data;
  require(d.sequence_length > 0, document, "data.sequence_length",
          "the number of tokens per sequence");
  if (d.files().empty()) {
    document.fail("data",
                  "no training data; give data.text, data.tokens, data.documents or data.pairs");
  }
  const auto given_too = [&](const std::vector<std::string>& files, std::string_view key) {
    if (files.empty() || d.kind() == key) return;
    document.fail(fmt::format("data.{}", key),
                  fmt::format("data.{} is given too; give one of them", d.kind()));
  };
  given_too(d.tokens, "tokens");
  given_too(d.documents, "documents");
  given_too(d.pairs, "pairs");
  const Json* const eval = find_given(document.root(), "data.eval");
  if (eval != nullptr && eval->is_number() && find_given(document.root(), "data.held_out")) {
    document.fail("data.held_out", "data.eval gives a share too; give one of them");
  }
  if (!d.text.empty() && c.model.vocab_size < kByteValues) {
    document.fail(
        "model.vocab_size",
        fmt::format("must be at least 256 for data.text, which is read byte by byte, got {}",
                    c.model.vocab_size));
  }
  if (!d.tokens.empty() && d.token_type == TokenType::u16 && c.model.vocab_size > kU16Values) {
    document.fail("data.token_type",
                  fmt::format("u16 holds 65536 tokens, but model.vocab_size is {}; use u32",
                              c.model.vocab_size));
  }
}

void complete_optimizer(Config& c, const Document& document) {
  OptimizerSection& o = c.optimizer;
  if (o.type == cpu_adam::Optimizer::adam && o.adam_w_mode) o.type = cpu_adam::Optimizer::adamw;
  if (o.nesterov && o.momentum == 0.0) {
    document.fail("optimizer.params.nesterov", "needs a momentum above 0; give momentum");
  }
  if (!cpu_adam::has_first_moment(o.type) &&
      c.ballast.optimizer_states == cpu_adam::Moments::Format::bf16_first) {
    document.fail("ballast.optimizer_states",
                  fmt::format("\"bf16_first\" applies to the first moment, which {} lacks; use "
                              "\"fp32\" or \"8bit\"",
                              name_of(o.type)));
  }
}

void check_scheduler(Config& c, const Document& document) {
  using enum SchedulerSection::Type;
  SchedulerSection& s = c.scheduler;
  if (s.type == linear && s.total_num_steps == 0) s.total_num_steps = c.ballast.steps;
  if (s.type == warmup_decay || s.type == warmup_cosine) {
    constexpr const char* kPath = "scheduler.params.total_num_steps";
    // Plans and evaluations need no number of steps. A run is refused without one.
    const bool automatic = c.ballast.steps == 0 && find_path(document.root(), kPath) != nullptr;
    require(s.total_num_steps > 0 || automatic, document, kPath,
            "the step at which the schedule ends");
  }
  if (s.warmup_max_lr && s.warmup_min_lr > *s.warmup_max_lr) {
    document.fail("scheduler.params.warmup_min_lr",
                  fmt::format("{} is above warmup_max_lr {}", s.warmup_min_lr, *s.warmup_max_lr));
  }
}

/// Notes missing parameters of the optimizer whose default differs in DeepSpeed. With torch_adam it
/// has torch's defaults, which are Ballast's.
void note_optimizer_defaults(Config& c, const Document& document) {
  const Json* const section = document.root().find("optimizer");
  if (section == nullptr || !section->is_object()) return;  // DeepSpeed has no default optimizer
  const Json* const torch = find_path(*section, "params.torch_adam");
  if (torch != nullptr && torch->is_boolean() && torch->flag()) return;
  std::vector<std::string> ignored;
  const Json own = write_section(optimizer_keys(c.optimizer, ignored));
  for (const auto& [parameter, theirs] : row_of(c.optimizer.type).deepspeed) {
    const std::string path = fmt::format("params.{}", parameter);
    if (parameter.empty() || find_given(*section, path) != nullptr) continue;
    const std::string value = find_path(own, path)->compact();
    if (value == theirs) continue;
    c.notes.push_back(fmt::format(
        "optimizer.{}: not given, so it is {}; DeepSpeed would take {}; give the key to "
        "choose",
        path, value, theirs));
  }
}

/// WarmupDecayLR of DeepSpeed does not read the optimizer's learning rate; WarmupLR reads it since
/// version 0.17.2. Transformers fills it in for "auto", which is null here.
void note_warmup_rate(Config& c, const Document& document) {
  using enum SchedulerSection::Type;
  constexpr double kDeepSpeed = 1e-3;
  const bool decays = c.scheduler.type == warmup_decay;
  const bool warms_up = c.scheduler.type == warmup || decays;
  if (!warms_up || c.scheduler.warmup_max_lr || c.optimizer.lr == kDeepSpeed) return;
  if (find_path(document.root(), "scheduler.params.warmup_max_lr") != nullptr) return;
  c.notes.push_back(
      fmt::format("scheduler.params.warmup_max_lr: not given, so it is optimizer.params.lr {}; "
                  "DeepSpeed{} would take {}",
                  c.optimizer.lr, decays ? "" : " before 0.17.2", kDeepSpeed));
}

/// DeepSpeed warms up for at least 2 steps. Its version 0.19.8 refuses 0.
void note_short_warmup(Config& c, const Document& document) {
  constexpr std::uint64_t kLeast = 2;
  using enum SchedulerSection::Type;
  const std::uint64_t given = c.scheduler.warmup_num_steps;
  const bool exact = c.scheduler.type == constant || c.scheduler.type == linear;
  if (exact || given >= kLeast) return;
  if (find_path(document.root(), "scheduler.params.warmup_num_steps") == nullptr) return;
  c.notes.push_back(
      fmt::format("scheduler.params.warmup_num_steps: {} counts as {}, as in DeepSpeed{}; give {}",
                  given, kLeast, given == 0 ? " before 0.19.8, which refuses 0" : "", kLeast));
}

void complete_placement(Config& c, const Document& document) {
  const std::uint64_t last = model::count_blocks(c.model, c.rank_split()) - 1;
  for (std::size_t i = 0; i < c.ballast.placement.size(); ++i) {
    auto& rule = c.ballast.placement[i];
    if (rule.last_block == std::numeric_limits<std::uint64_t>::max()) rule.last_block = last;
    if (rule.last_block > last) {
      document.fail(
          fmt::format("ballast.placement[{}].blocks", i),
          fmt::format("there is no block {}; the model has blocks 0 (embedding) to {} (head)",
                      rule.last_block, last));
    }
  }
}

/// Layers with adapters are not cut.
void complete_layer_tiles(Config& c, const Document& document) {
  if (!c.ballast.adapters) return;
  if (c.model.layer_tiles > 1) {
    document.fail("model.layer_tiles",
                  fmt::format("is {}, but layers with adapters are not cut into tiles; set it to 1",
                              c.model.layer_tiles));
  }
  c.model.layer_tiles = 1;
}

/// Number of frozen matrices that `model` keeps quantised, and number of these that are stored in
/// NF4.
struct QuantizedMatrices {
  QuantizedMatrices(const model::Architecture& model, const std::set<std::string>& names) {
    for (const model::BlockSpec& block : model.blocks) {
      for (const model::TensorSpec& tensor : block.tensors) {
        if (!tensor.quantized) continue;
        ++all;
        stored += is_nf4(names, tensor.name) ? 1 : 0;
      }
    }
  }
  std::size_t all = 0;
  std::size_t stored = 0;
};

/// Resolves "auto": nf4 if all frozen matrices are stored in NF4, otherwise none.
void complete_quantized_base(Config& c) {
  QuantizedBase& base = c.ballast.quantized_base;
  if (base != QuantizedBase::automatic) return;
  base = QuantizedBase::none;
  const bool freezes = c.ballast.adapters || !c.ballast.train.empty();
  if (!freezes || c.initial_weights.empty()) return;
  const auto names = stored_names(c.initial_weights);
  if (!names || !are_quantized(*names)) return;
  struct Refused {};
  try {
    base = QuantizedBase::nf4;
    const QuantizedMatrices matrices(
        model_of(c, [](const std::string&, const std::string&) { throw Refused(); }), *names);
    if (matrices.stored < matrices.all) base = QuantizedBase::none;
    if (matrices.stored == 0) return;
    if (matrices.stored < matrices.all) {
      c.notes.push_back(fmt::format(
          "ballast.quantized_base: \"auto\" is \"none\": {} of {} frozen matrices of model.weights "
          "are nf4, which is decoded; \"nf4\" would encode the others too",
          matrices.stored, matrices.all));
      return;
    }
  } catch (const Refused&) {
    base = QuantizedBase::none;
    return;
  }
  c.ballast.double_quantization |=
      std::any_of(names->begin(), names->end(),
                  [](const std::string& name) { return name.ends_with(".nested_absmax"); });
  c.notes.push_back(
      fmt::format("ballast.quantized_base: \"auto\" is \"nf4\"{}, which model.weights are",
                  c.ballast.double_quantization ? " with double_quantization" : ""));
}

/// Rejects a speed for routers whose correction biases cannot be moved.
void check_router_biases(const Config& c, const Document& document) {
  if (c.router_bias_update_speed == 0.0) return;
  constexpr const char* kKey = "model.router_bias_update_speed";
  if (c.ballast.adapters) {
    document.fail(kKey,
                  "training adapters leaves the model as it is, including the correction biases of "
                  "its routers; remove this key");
  }
  const model::Architecture model = model::build_architecture(c.model, c.rank_split());
  const auto has_biases = [](const model::BlockSpec& block) {
    return model::correction_biases(block) != nullptr;
  };
  if (std::ranges::any_of(model.blocks, has_biases)) return;
  document.fail(kKey, fmt::format("this {} model has no router with correction biases, which "
                                  "sigmoid routers have; remove this key",
                                  c.model.family));
}

void check_trained(Config& c, const Document& document) {
  if (c.ballast.double_quantization && c.ballast.quantized_base != QuantizedBase::nf4) {
    document.fail(
        "ballast.double_quantization",
        fmt::format(
            "is for the scales of \"nf4\", but ballast.quantized_base is \"{}\"; set this to false",
            name_of(c.ballast.quantized_base)));
  }
  const bool plain = c.ballast.quantized_base == QuantizedBase::none;
  const bool decays_all = c.ballast.weight_decay_exclude.empty();
  if (plain && decays_all && c.ballast.train.empty() && !c.ballast.adapters &&
      c.data.pairs.empty()) {
    return;
  }
  const model::Architecture model = model_of(
      c, [&](const std::string& path, const std::string& rule) { document.fail(path, rule); });
  check_pairs(c, model, document);
  const std::string note = note_about_peft(model, c.initial_weights);
  if (!note.empty()) c.notes.push_back("ballast.adapters: " + note);
}

void check_kernels(const BallastSection& b, const Document& document) {
  if (b.kernels != model::KernelSet::plain || b.attention != model::AttentionBackend::cudnn) return;
  document.fail("ballast.attention",
                "is \"cudnn\", but ballast.kernels \"plain\" uses no library; remove one of them");
}

void check_aio(const AioSection& a, const Document& document) {
  if (a.abandon_seconds < a.stall_seconds) {
    document.fail("aio.abandon_seconds",
                  fmt::format("{} is below stall_seconds {}; raise it, or lower stall_seconds",
                              a.abandon_seconds, a.stall_seconds));
  }
  if (a.buffered && a.iopoll) {
    document.fail("aio.iopoll", "needs direct I/O, but aio.buffered is set; set one of them only");
  }
}

/// Notes entries of aio.paths that no transfer uses. They are not errors, since several configs may
/// share one list.
void note_unused_paths(Config& c) {
  std::vector<std::filesystem::path> used = c.zero.optimizer.nvme_path;
  const auto& more = c.zero.parameters.nvme_path;
  used.insert(used.end(), more.begin(), more.end());
  if (used.empty()) return;  // swap files go to the run directory, which may be unknown here
  for (std::size_t i = 0; i < c.aio.paths.size(); ++i) {
    const auto& path = c.aio.paths[i].path;
    if (std::find(used.begin(), used.end(), path) != used.end()) continue;
    c.ignored.push_back(fmt::format("aio.paths[{}]: no nvme_path names {}", i, path.string()));
  }
}

void check_zero(const ZeroSection& zero, const Document& document) {
  if (zero.stage == 3) return;
  if (zero.quantized_weights) {
    document.fail("zero_optimization.zero_quantized_weights",
                  fmt::format("applies only to the gathers of stage 3, but the stage is {}; set "
                              "stage to 3 or this to false",
                              zero.stage));
  }
  if (zero.hpz_partition_size > 1) {
    document.fail(
        "zero_optimization.zero_hpz_partition_size",
        fmt::format("applies only to stage 3, but the stage is {}; set stage to 3 or this to 1",
                    zero.stage));
  }
}

/// Rejects a setting given with both of its names.
void check_persistence(const Json& root, const Document& document) {
  const auto given = [&root](const char* path) { return find_given(root, path) != nullptr; };
  if (given("zero_optimization.param_persistence_threshold") &&
      given("zero_optimization.stage3_param_persistence_threshold")) {
    document.fail("zero_optimization.param_persistence_threshold",
                  "stage3_param_persistence_threshold, the same setting, is given too; remove one");
  }
}

/// Rejects contradictory values of the two names of one setting.
void check_activations(const Json& root, const Document& document) {
  const Json* const theirs = find_given(root, "activation_checkpointing.cpu_checkpointing");
  const Json* const ours = find_given(root, "ballast.activations");
  if (theirs == nullptr || ours == nullptr) return;
  const bool on_host = *ours == "host" || *ours == "cpu";
  if (theirs->flag() != on_host) {
    document.fail("activation_checkpointing.cpu_checkpointing",
                  fmt::format("is {}, but ballast.activations, the same setting, is {}; remove one",
                              theirs->compact(), ours->compact()));
  }
}

/// Checks that only one of the two 16-bit types is on, and that the loss scale can fall.
void check_type(const Config& c, const Document& document) {
  if (c.type != DType::f16) return;
  const Json* const bf16 = find_path(document.root(), "bf16.enabled");
  if (bf16 != nullptr && bf16->is_boolean() && bf16->flag()) {
    document.fail("fp16.enabled", "bf16.enabled is true, too; set one of them to false");
  }
  const Fp16Section& f = c.fp16;
  if (f.loss_scale != 0.0) return;
  if (f.min_loss_scale > f.initial_scale()) {
    document.fail("fp16.min_loss_scale",
                  fmt::format("{} is above the first scale, 2 to the power of initial_scale_power "
                              "{}; lower it or raise that",
                              f.min_loss_scale, f.initial_scale_power));
  }
  if (c.ballast.update != step::Update::eager) return;
  document.fail("ballast.update",
                "\"eager\" cannot skip a step, which a dynamic loss scale needs; use \"gated\", or "
                "set fp16.loss_scale to a constant");
}

void check_update(const Config& c, const Document& document) {
  if (c.ballast.update == step::Update::eager && c.ballast.speculative_updates.value_or(0) > 0) {
    document.fail("ballast.speculative_updates",
                  fmt::format("is {}, but ballast.update is \"eager\", which updates every block "
                              "at once; set this to 0 or use \"gated\"",
                              *c.ballast.speculative_updates));
  }
  if (c.ballast.update != step::Update::eager || c.gradient_clipping == 0.0) return;
  document.fail("ballast.update",
                fmt::format("\"eager\" updates a block before the norm of all gradients is known, "
                            "but gradient_clipping is {}; set it to 0 or use \"gated\"",
                            c.gradient_clipping));
}

}  // namespace

bool Config::has_positions() const {
  if (!data.documents.empty()) return true;
  return !data.pairs.empty() && model::depends_on_documents(model, data.sequence_length);
}

model::TrainedParts trained_parts(const Config& config) {
  const BallastSection& ballast = config.ballast;
  model::TrainedParts parts = {.adapters = ballast.adapters,
                               .train = ballast.train,
                               .weight_decay_exclude = ballast.weight_decay_exclude};
  const QuantizedBase base = ballast.quantized_base;
  using Format = model::Quantization::Format;
  if (base == QuantizedBase::nf4 || base == QuantizedBase::int8) {
    parts.quantized_base = {.format = base == QuantizedBase::nf4 ? Format::nf4 : Format::int8,
                            .double_scales = ballast.double_quantization};
  }
  return parts;
}

model::Architecture model_of(
    const Config& config,
    const std::function<void(const std::string& path, const std::string& rule)>& fail) {
  return model::build_trained(config.model, config.rank_split(), trained_parts(config),
                              [&](std::string_view key, const std::string& rule) {
                                fail(fmt::format("ballast.{}", key), rule);
                              });
}

void complete(Config& config, const Document& document, std::uint64_t world) {
  // 0 is off, as in DeepSpeed.
  config.sequence_parallel = std::max<std::uint64_t>(config.sequence_parallel, 1);
  config.tensor_parallel = std::max<std::uint64_t>(config.tensor_parallel, 1);
  check_data(config, document);
  note_partitioned_activations(config);
  check_cuttable(config, document);
  check_tensor_parallel(config, document, world);
  complete_layer_tiles(config, document);
  complete_devices(config, document);
  complete_model(config, document);
  if (world == 0 && config.batch.micro_batch > 0) config.batch.train_batch = 0;
  check_sequence_parallel(config, document, world);
  const std::uint64_t known_ranks = world;  // 0: unknown
  world = std::max<std::uint64_t>(world, 1);
  complete_batch(config, document,
                 std::max<std::uint64_t>(world / config.ranks_per_batch_part(), 1));
  check_router_losses(config, document);
  complete_optimizer(config, document);
  check_scheduler(config, document);
  note_optimizer_defaults(config, document);
  note_warmup_rate(config, document);
  note_short_warmup(config, document);
  complete_placement(config, document);
  complete_quantized_base(config);
  check_router_biases(config, document);
  check_trained(config, document);
  check_zero(config.zero, document);
  check_kernels(config.ballast, document);
  check_aio(config.aio, document);
  note_unused_paths(config);
  check_activations(document.root(), document);
  check_persistence(document.root(), document);
  check_type(config, document);
  check_update(config, document);
  check_faults(config.ballast, document, world, config.notes);
  note_unused_keys(config, document, known_ranks);
}

}  // namespace ballast::config
