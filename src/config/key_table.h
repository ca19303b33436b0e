#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/config/config.h"

#include "src/config/key.h"

namespace ballast::config {

/// The table of all keys. It refers to the fields of `config` and must not outlive it.
Section all_keys(Config& config);

// Parts of that table. DeepSpeed's keys without effect are noted in `log` as "path: reason".

Section model_keys(Config& config);
/// Replaces marks in the text of a key of the model section: "{families}" by those that have the
/// key,
/// "{defaults}" by its defaults in them.
void name_families(KeyInfo& row);
Section ballast_keys(BallastSection& ballast, step::BufferCounts& buffers);
Section optimizer_keys(OptimizerSection& optimizer, std::vector<std::string>& log);
Section scheduler_keys(SchedulerSection& scheduler);
Section zero_keys(ZeroSection& zero, step::BufferCounts& buffers, std::vector<std::string>& log);
Section pipeline_keys(PipelineSection& pipeline, std::vector<std::string>& log);
Section tensor_parallel_keys(std::uint64_t& size, std::vector<std::string>& log);
Section aio_keys(AioSection& aio, std::vector<std::string>& log);
/// The key at `path`, one of step::kBufferKinds.
Key buffers_key(std::string_view path, step::BufferCounts& buffers);
/// checkpoint_every: steps, or a time such as "30m".
Key checkpoint_every_key(BallastSection& ballast);
/// train: "all", "adapters" or patterns of names of tensors. adapters follows it.
Key train_key(BallastSection& ballast);
Key adapters_key(BallastSection& ballast);
/// weight_decay_exclude: "none", "transformers" or patterns of names of tensors.
Key weight_decay_exclude_key(BallastSection& ballast);
/// devices: "auto" or GPU numbers.
Key devices_key(std::vector<std::uint32_t>& devices);
/// Derives pipeline.stages from ballast.devices. Throws Error(config) if they contradict each other
/// or ballast.order.
void complete_devices(Config& config, const Document& document);
/// Throws Error(config) if the complete model has too few blocks for pipeline.stages.
void check_stages(const Config& config, const Document& document);
/// Applies DeepSpeed's rule: train = micro x accumulation x data places. Derives missing values and
/// throws Error(config) if the three contradict each other.
void complete_batch(Config& config, const Document& document, std::uint64_t places);
/// Throws Error(config) if router losses of the whole step need another ballast.order.
void check_router_losses(const Config& config, const Document& document);
/// Throws Error(config) unless `ranks` ranks (0: unknown) can share sequences and heads, and all
/// parts of the model can compute with a part of each sequence.
void check_sequence_parallel(const Config& config, const Document& document, std::uint64_t ranks);
/// Throws Error(config) for a key of the model section, or for tensor_parallel if it is the reason
/// why the model has tiles. `rule` is the rule that the value breaks.
[[noreturn]] void refuse_model(const Config& config, const Document& document, std::string_view key,
                               const std::string& rule);
/// Notes partition_activations if it has no effect.
void note_partitioned_activations(Config& config);
/// Throws Error(config) for settings with which ranks cannot share the tiles of a layer.
void check_cuttable(const Config& config, const Document& document);
/// Throws Error(config) unless `ranks` ranks (0: unknown) can share heads. The numbers of tiles are
/// checked when the model is completed.
void check_tensor_parallel(const Config& config, const Document& document, std::uint64_t ranks);
/// preference: the loss of data.pairs, with names of TRL's DPOConfig.
Key preference_key(model::Preference& preference);
/// Throws Error(config) for settings that data.pairs needs or cannot have, and notes where TRL
/// differs.
void check_pairs(Config& config, const model::Architecture& model, const Document& document);
/// spike: an action, or an object.
Key spike_key(SpikeSection& spike);
/// Throws Error(config) for settings that need checkpoints if there are none. Notes settings that
/// do not work with several ranks.
void check_faults(const BallastSection& ballast, const Document& document, std::uint64_t world,
                  std::vector<std::string>& notes);

/// Notes keys of the model section that the config names although other keys switch them off.
/// `given`: the model as given, before it is completed.
void note_unused_model_keys(Config& config, const model::ModelConfig& given,
                            const Document& document);
/// Notes other keys of a complete config that other keys switch off, if their values differ from
/// the defaults.
void note_unused_keys(Config& config, const Document& document, std::uint64_t world);

/// `table` plus DeepSpeed's keys of `section` ("" is the top level) that Ballast does not
/// implement. Keys that do not affect results are accepted and noted in `log`; others are an error
/// unless they are switched off.
Section with_deepspeed_keys(Section table, std::string_view section, std::vector<std::string>& log);

/// Whether `name` is a key that is accepted with any value.
bool has_no_effect(std::string_view section, std::string_view name);

/// Rewrites DeepSpeed's deprecated keys to the current ones and adds a note for each to `log`.
/// Throws Error(config) if both are given.
void map_deprecated(Document& document, std::vector<std::string>& log);

/// Returns the path of a section of the root in a document before map_deprecated(): its deprecated
/// one if the document has that, otherwise {`name`}.
std::vector<std::string> written_section(const Json& root, const std::string& name);

/// Adds the optimizer and the schedule that transformers' Trainer would make if the config has no
/// optimizer, and notes it: such configs are templates for the Trainer.
void fill_in_optimizer(Document& document, std::vector<std::string>& notes);

/// Replaces "auto" where Hugging Face's integration of DeepSpeed fills in a value, and notes it.
void replace_auto(Document& document, std::vector<std::string>& log);

/// Replaces model.path by the keys of its folder and model.weights. Throws Error(config) if other
/// keys of the model are given too, and like read_model_section().
void expand_model_path(Document& document, std::vector<std::string>& notes);

/// Adds the settings of the folder at ballast.adapters.path to ballast.adapters. Throws
/// Error(config) if a given key other than dropout differs, and like read_adapter_folder().
void expand_adapter_path(Document& document);

/// Derives missing values (batch triplet, defaults that depend on other keys) and checks keys
/// against each other. Throws Error(config) naming the keys and their values.
void complete(Config& config, const Document& document, std::uint64_t world);

/// The path of the key or section that `path` names without its section: "lr" is
/// optimizer.params.lr. Returns a path that begins at the top, or that no section has, unchanged.
/// Calls `refuse`, which throws, if several sections have it.
std::string whole_path(const std::string& path,
                       const std::function<void(const std::string&)>& refuse);

}  // namespace ballast::config
