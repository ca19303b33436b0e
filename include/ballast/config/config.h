#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/config/choices.h"
#include "ballast/core/dtype.h"
#include "ballast/core/places.h"
#include "ballast/core/units.h"
#include "ballast/model/architecture.h"
#include "ballast/model/kernels.h"

namespace ballast::config {

/// A tier named in the config, or "auto": the planner decides block by block.
using TierChoice = std::optional<Tier>;

/// `data`: the training data. Has exactly one of text, tokens, documents and pairs.
struct DataSection {
  std::vector<std::string> text;       ///< files, folders or globs, read byte by byte
  std::vector<std::string> tokens;     ///< token files (.bin)
  std::vector<std::string> documents;  ///< files of documents (.safetensors)
  std::vector<std::string> pairs;      ///< files of preference pairs (.safetensors)
  TokenType token_type = TokenType::automatic;
  std::uint64_t sequence_length = 0;
  double held_out = 0.05;         ///< share of the tokens kept for evaluation, 0 to 0.5
  std::vector<std::string> eval;  ///< files for evaluation, of the same kind as the training data
  bool shuffle = true;
  /// Reads the files as their keys say, even if they look like another format or were made with
  /// another tokenizer.
  bool as_is = false;

  /// The key that names the training data.
  [[nodiscard]] std::string_view kind() const {
    if (!text.empty()) return "text";
    return !tokens.empty() ? "tokens" : !documents.empty() ? "documents" : "pairs";
  }
  /// Files of the training data.
  [[nodiscard]] const std::vector<std::string>& files() const {
    if (!text.empty()) return text;
    return !tokens.empty() ? tokens : !documents.empty() ? documents : pairs;
  }
  /// The files of `eval` as training data.
  [[nodiscard]] DataSection evaluation() const {
    DataSection section = *this;
    auto& own = !text.empty()     ? section.text
                : !tokens.empty() ? section.tokens
                                  : (!documents.empty() ? section.documents : section.pairs);
    own = eval;
    return section;
  }
  /// Sequences per sample of the batch size.
  [[nodiscard]] std::uint64_t sequences_per_sample() const { return pairs.empty() ? 1 : 2; }
};

/// `optimizer`: the types and parameters of DeepSpeed and torch.optim. Parameters that the type
/// does not have keep the values below.
struct OptimizerSection {
  cpu_adam::Optimizer type = cpu_adam::Optimizer::adamw;
  /// Used only while reading: "Adam" means AdamW unless this is false. Afterwards `type` has the
  /// result, and this is false only for adam.
  bool adam_w_mode = true;
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
  double momentum = 0.0;
  bool nesterov = false;

  /// The defaults of a config that gives only the type.
  static OptimizerSection defaults(cpu_adam::Optimizer type);
  friend bool operator==(const OptimizerSection&, const OptimizerSection&) = default;
};

/// `scheduler`: DeepSpeed's learning-rate schedules, or constant.
struct SchedulerSection {
  enum class Type { constant, linear, warmup, warmup_decay, warmup_cosine };
  Type type = Type::constant;
  double warmup_min_lr = 0.0;
  std::optional<double> warmup_max_lr;  ///< unset: optimizer.lr
  std::uint64_t warmup_num_steps = 1000;
  bool warmup_linear = false;         ///< warmup_type: log (default) or linear
  std::uint64_t total_num_steps = 0;  ///< for linear 0 while the number of steps is unknown
  double warmup_min_ratio = 0.0;
  double cos_min_ratio = 1e-4;
};

template <>
inline constexpr auto kChoices<SchedulerSection::Type> =
    std::to_array<NamedValue<SchedulerSection::Type>>(
        {{"constant", SchedulerSection::Type::constant},
         {"linear", SchedulerSection::Type::linear},
         {"WarmupLR", SchedulerSection::Type::warmup},
         {"WarmupDecayLR", SchedulerSection::Type::warmup_decay},
         {"WarmupCosineLR", SchedulerSection::Type::warmup_cosine}});

/// Derived and checked like in DeepSpeed: train = micro x accumulation x data places (ranks /
/// (sequence_parallel_size x tensor_parallel.autotp_size)), where any one may be missing.
struct BatchSection {
  std::uint64_t train_batch = 0;
  std::uint64_t micro_batch = 0;
  std::uint64_t accumulation = 0;
  /// "auto": the planner chooses micro_batch and accumulation, which contain one valid choice until
  /// then.
  bool automatic = false;
};

/// Maximum of pipeline.stages.
inline constexpr std::uint32_t kMaxStages = 8;

/// `pipeline`: the devices of a rank, to which the blocks of the model are dealt.
struct PipelineSection {
  std::uint32_t stages = 1;  ///< number of devices of each rank; 0 ("auto"): the planner's choice
};

struct OffloadSection {
  TierChoice tier = Tier::device;                ///< device: none | cpu | nvme | auto
  std::vector<std::filesystem::path> nvme_path;  ///< folders; empty: the run directory
};

struct ZeroSection {
  int stage = 0;
  /// Stage 3: blocks with at most this many parameters keep full weights on every rank.
  std::uint64_t persistence_threshold = 0;
  /// Stage 3: number of ranks that share one copy of the sharded weights; 1: all ranks.
  std::uint64_t hpz_partition_size = 1;
  bool quantized_weights = false;  ///< stage 3: all-gathers move 8-bit codes, which changes results
  /// Maximum number of elements whose states are moved and updated together; 0: the planner
  /// chooses.
  std::uint64_t sub_group_size = 0;
  OffloadSection optimizer;
  OffloadSection parameters;
};

/// An entry of `aio.paths`: settings of one folder. The defaults are those of `aio`.
struct AioPath {
  std::filesystem::path path;
  Bytes block_size = 1 * kMiB;
  unsigned queue_depth = 32;
  IoBackend backend = IoBackend::automatic;
  double read_gbps = 0.0;  ///< measured bandwidth, 10^9 bytes per second; 0: not measured
  double write_gbps = 0.0;
  friend bool operator==(const AioPath&, const AioPath&) = default;
};

/// `aio`: how files are read and written.
struct AioSection {
  Bytes block_size = 1 * kMiB;
  unsigned queue_depth = 32;
  IoBackend backend = IoBackend::automatic;
  Bytes in_flight_bytes = 64 * kMiB;  ///< per path
  double stall_seconds = 30.0;        ///< seconds after which a transfer causes a warning
  double abandon_seconds = 300.0;     ///< timeout of a transfer; at least stall_seconds
  bool sqpoll = false;
  bool iopoll = false;
  bool buffered = false;         ///< use the page cache instead of O_DIRECT
  bool any_file_system = false;  ///< swap to tmpfs, overlay and network file systems too
  std::vector<AioPath> paths;    ///< without duplicates
};

/// `ballast.spike`: the reaction of a run to a loss spike (src/train/step_rules.h).
struct SpikeSection {
  enum class Action { off, warn, stop, rollback };
  Action action = Action::off;
  std::uint64_t window = 50;  ///< number of previous steps that a loss is compared with
  double factor = 6.0;        ///< standard deviations above their mean that make a spike
  /// Rollbacks without a new checkpoint in between before the run stops.
  std::uint64_t most_rollbacks = 3;
};

template <>
inline constexpr auto kChoices<SpikeSection::Action> =
    std::to_array<NamedValue<SpikeSection::Action>>({{"off", SpikeSection::Action::off},
                                                     {"warn", SpikeSection::Action::warn},
                                                     {"stop", SpikeSection::Action::stop},
                                                     {"rollback", SpikeSection::Action::rollback}});

/// `ballast.adapters`.
struct AdapterSection : model::AdapterConfig {
  std::filesystem::path path;  ///< PEFT folder to start from; empty: new adapters
};

/// `ballast`: settings that DeepSpeed lacks.
struct BallastSection {
  DeviceChoice device = DeviceChoice::automatic;
  model::KernelSet kernels = model::KernelSet::best;
  model::GpuChecks gpu_checks = model::GpuChecks::off;
  model::AttentionBackend attention = model::AttentionBackend::best;
  ProductSearch product_algorithms = ProductSearch::automatic;
  /// GPU numbers of the rank's devices; empty ("auto"): consecutive ones. A number may occur more
  /// than once: these devices share the GPU.
  std::vector<std::uint32_t> devices;
  Bytes device_bytes = 0;  ///< budget of each device; 0 ("auto"): the free memory
  Bytes host_bytes = 0;    ///< budget; 0 ("auto"): 80% of the cgroup's or machine's memory
  /// Patterns of the names of trained tensors (model::freeze()); empty ("all"): all are trained.
  std::vector<std::string> train;
  std::optional<AdapterSection> adapters;  ///< set if train is "adapters"
  /// Patterns of the names of tensors without weight decay (model::exempt_from_decay()).
  std::vector<std::string> weight_decay_exclude;
  model::Preference preference;  ///< loss of data.pairs
  /// Automatic until the config is complete: nf4 if the weights are stored in nf4.
  QuantizedBase quantized_base = QuantizedBase::automatic;
  bool double_quantization = false;           ///< for nf4: quantise the scales, too
  std::optional<step::Order> order;           ///< unset ("auto"): the planner's choice
  step::Update update = step::Update::gated;  ///< eager: without gradient clipping
  /// Number of blocks, evenly spread over those with states below the device, that gated updates
  /// update before the norm is known; unset ("auto"): the planner's choice.
  std::optional<std::uint64_t> speculative_updates;
  step::ExpertUpdates expert_updates = step::ExpertUpdates::all;
  model::RouterLossSpan router_losses = model::RouterLossSpan::step;
  /// Whether weights of experts are prefetched before their router has chosen; unset ("auto"): the
  /// planner's choice.
  std::optional<bool> expert_prefetch;
  /// Ranks that share the experts of a layer, with one in each block; 1: each rank has all experts;
  /// 0 ("auto"): the planner's choice.
  std::uint64_t expert_parallel = 0;
  bool serial = false;
  bool nvtx = false;                        ///< mark operations as ranges in NVIDIA's profilers
  std::optional<std::uint64_t> delay_seed;  ///< delay operations at random, for debugging
  /// Tier that stores block inputs for the backward pass;
  /// activation_checkpointing.cpu_checkpointing means host.
  TierChoice activations;
  /// Tier of the gradients of blocks that are updated on the host, until their update: host or
  /// nvme.
  TierChoice gradients;
  /// `recompute`: which intermediates of layers the backward pass does not recompute; unset
  /// ("auto"): those that fit.
  std::optional<step::Kept> kept;
  int compute_threads = 0;  ///< 0: all CPUs
  int update_threads = 0;
  std::optional<Isa> update_isa;        ///< unset ("auto"): the best one of this machine
  std::optional<int> update_numa_node;  ///< node whose CPUs run the update; unset ("auto"): any
  /// bf16_first and blockwise8 change the arithmetic.
  cpu_adam::Moments::Format optimizer_states = cpu_adam::Moments::Format::f32;
  double link_gbps = 0.0;
  std::vector<step::PlacementRule> placement;  ///< later entries win
  std::uint64_t steps = 0;
  std::uint64_t seed = 1234;
  std::uint64_t eval_every = 0;          ///< steps between evaluations; 0: only at the end
  std::uint64_t eval_batches = 8;        ///< micro-batches per evaluation
  double stop_at_loss = 0.0;             ///< held-out loss below which a run ends; 0: none
  bool save_weights = true;              ///< write the weights to the run directory at the end
  std::uint64_t checkpoint_every = 0;    ///< steps between checkpoints; 0: not by steps
  double checkpoint_seconds = 0.0;       ///< time between checkpoints; 0: not by time
  std::uint64_t checkpoint_keep = 2;     ///< number of latest checkpoints to keep
  std::uint64_t max_skipped_steps = 10;  ///< non-finite steps in a row before the run stops
  SpikeSection spike;
  OnError on_error = OnError::stop;
  double comm_timeout_seconds = 300.0;  ///< how long a rank waits for the others
  std::filesystem::path out;            ///< run directory

  /// Ranks that share the experts of a layer, for model::build_architecture().
  [[nodiscard]] std::uint64_t expert_ranks() const {
    return expert_parallel > 1 ? expert_parallel : 1;
  }
  /// Whether a signal ends the run after the step with a checkpoint, instead of during the step.
  [[nodiscard]] bool writes_checkpoints() const {
    return checkpoint_every > 0 || checkpoint_seconds > 0.0;
  }
};

/// `tensorboard`, `csv_monitor`: scalars of each step for other programs, as DeepSpeed writes them.
struct MonitorSection {
  bool enabled = false;
  std::filesystem::path output_path;          ///< empty: the run directory
  std::string job_name = "DeepSpeedJobName";  ///< name of the folder in it
};

/// `fp16`: the loss scale of training in fp16.
struct Fp16Section {
  double loss_scale = 0.0;                 ///< constant scale; 0: dynamic
  std::uint64_t initial_scale_power = 16;  ///< a dynamic scale begins with 2 to this power
  std::uint64_t loss_scale_window = 1000;  ///< steps without overflow before it doubles
  std::uint64_t hysteresis = 2;            ///< overflows before it is halved
  bool consecutive_hysteresis = false;     ///< a step without overflow restores the hysteresis
  double min_loss_scale = 1.0;

  [[nodiscard]] double initial_scale() const {
    return static_cast<double>(std::uint64_t{1} << initial_scale_power);
  }
};

/// A value of Config::steps_per_print above every number of steps.
inline constexpr std::uint64_t kNoProgressLines = std::uint64_t{1} << 40U;

/// The whole effective configuration. Paths are absolute.
struct Config {
  model::ModelConfig model;               ///< complete
  std::filesystem::path initial_weights;  ///< model.weights, a safetensors file; empty: random
  /// `model.router_bias_update_speed`: change of a router's correction biases per update, see
  /// engine::EngineOptions; 0: they stay as they are.
  double router_bias_update_speed = 0.0;
  DataSection data;
  OptimizerSection optimizer;
  SchedulerSection scheduler;
  BatchSection batch;
  ZeroSection zero;
  PipelineSection pipeline;
  step::BufferCounts buffers = step::kOpenBuffers;  ///< the keys of step::kBufferKinds
  AioSection aio;
  /// type of weights, activations and packed gradients: bf16.enabled, fp16.enabled, or f32
  DType type = DType::bf16;
  Fp16Section fp16;
  /// `sequence_parallel_size`: number of ranks that share each sequence; 1: none.
  std::uint64_t sequence_parallel = 1;
  /// `tensor_parallel.autotp_size`: number of ranks that share the tiles of each layer; 1: none.
  std::uint64_t tensor_parallel = 1;
  /// `activation_checkpointing.partition_activations`: each of the ranks that share a layer stores
  /// an equal part of its input for the backward pass. No effect if there is one.
  bool partition_activations = false;
  /// Numbers of tiles that the config leaves to the program. The model section has the numbers that
  /// sizes suggest; planner::fitting_tiles() may raise them.
  model::OpenTiles open_tiles;
  double gradient_clipping = 1.0;     ///< 0: no clipping
  std::uint64_t steps_per_print = 1;  ///< number of steps, or kNoProgressLines
  MonitorSection tensorboard;
  MonitorSection csv_monitor;
  BallastSection ballast;
  /// Devices of each rank; 1 while the planner has not chosen.
  [[nodiscard]] std::uint32_t devices() const { return pipeline.stages == 0 ? 1 : pipeline.stages; }
  /// Ranks that together have one part of the batch: number of ranks per data place.
  [[nodiscard]] std::uint64_t ranks_per_batch_part() const {
    return sequence_parallel * tensor_parallel;
  }
  /// Numbers of ranks among which the model is split, for model::build_architecture().
  [[nodiscard]] model::RankSplit rank_split() const {
    return {ballast.expert_ranks(), tensor_parallel};
  }
  /// Sequences per micro-batch.
  [[nodiscard]] std::uint64_t micro_sequences() const {
    return batch.micro_batch * data.sequences_per_sample();
  }
  /// Whether a batch has the position of each token in its document: in packed documents, and in
  /// pairs if rotary positions depend on the length of a document, which excludes padding.
  [[nodiscard]] bool has_positions() const;
  /// "key.path: reason" for each known DeepSpeed key that has no meaning here.
  std::vector<std::string> ignored;
  /// "key.path: meaning here" for each value that has another meaning in DeepSpeed.
  std::vector<std::string> notes;
};

/// Returns the trained parts of the model, and the quantisation of the rest.
model::TrainedParts trained_parts(const Config& config);

/// The model of a complete config, with its adapters and frozen tensors. `fail` is called with the
/// path of a key and the rule that it breaks; it throws.
model::Architecture model_of(
    const Config& config,
    const std::function<void(const std::string& path, const std::string& rule)>& fail);

/// Reads a JSON file (comments allowed), applies `overrides` ("path=value", value as JSON or, if
/// that fails, as a string), checks everything and fills in defaults. Relative paths are relative
/// to the file. `world` is the number of ranks for the batch triplet, or 0 if only the batch of one
/// rank matters. Throws Error(config): one line with the file, the key's path, the mistake and, for
/// an unknown key, the nearest known one.
Config load(const std::filesystem::path& file, std::span<const std::string> overrides,
            std::uint64_t world = 1);

/// Like load(), from text. `base` is the directory of relative paths, and messages call the file
/// `name`.
Config parse(const std::string& text, const std::filesystem::path& base, const std::string& name,
             std::span<const std::string> overrides, std::uint64_t world = 1);

/// The effective config as indented JSON: every key with its value. parse() returns an equal
/// Config.
std::string print(const Config& config);

/// A key and its new value.
struct Edit {
  std::string path;  ///< "aio.block_size"
  std::string json;  ///< the value as JSON; further lines are indented with the key
};

/// Applies `edits` to the config `text`: replaces values and appends missing keys and sections to
/// their parents, formatted like their neighbours. A section that is null is replaced. If the text
/// has the section under its deprecated name (`zero_optimization.aio`, `bfloat16`), the key is set
/// there. All other bytes, including comments, stay the same. Throws Error(config), naming `name`,
/// for text that is not a config file and for a path through a value that is not a section.
std::string edit_text(std::string text, std::span<const Edit> edits, const std::string& name);

/// Applies `edits` to `file` atomically. The new text is written to a temporary file, parsed and
/// passed to `accept`, which throws to reject it; then the file is replaced and keeps its mode. A
/// failure keeps the old file. A symbolic link's target is edited. Throws Error(config) or
/// Error(io).
void edit_file(const std::filesystem::path& file, std::span<const Edit> edits,
               const std::function<void(const Config&)>& accept);

/// Does everything of edit_file() except replacing the file. Throws the same errors.
void try_edit(const std::filesystem::path& file, std::span<const Edit> edits,
              const std::function<void(const Config&)>& accept);

}  // namespace ballast::config
