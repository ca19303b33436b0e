
#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "ballast/text/json.h"

#include "src/config/key_table.h"

namespace ballast::config {
namespace {

enum class Treatment {
  ignored,      ///< any value is accepted and noted with the sentence
  off,          ///< false is accepted, true is an error with the sentence
  on,           ///< true is accepted, false is an error with the sentence
  off_section,  ///< an object that `enabled: true` switches on, which is an error with the sentence
  on_section,   ///< an object that only `enabled: false` switches off; otherwise an error
  one,          ///< sizes of at most 1 are accepted, larger ones are an error with the sentence
  refused,      ///< an error with the sentence for any value
  removed       ///< an error for any value; the sentence says why DeepSpeed refuses the key, and
                ///< what to do
};

struct KeyGroup {
  std::string_view section;
  Treatment treatment;
  std::string_view sentence;
  std::string_view names;  ///< separated by spaces
};

using enum Treatment;

// The names are those of DeepSpeed 0.19.8 (runtime/config.py, runtime/constants.py,
// runtime/zero/config.py and related files) and some that older versions have.
constexpr auto kGroups = std::to_array<KeyGroup>({
    {"", ignored,
     "metrics.jsonl has the times, traffic and memory of each step; --trace shows its "
     "operations",
     "wall_clock_breakdown memory_breakdown timers flops_profiler comms_logger"},
    {"", ignored,
     "metrics go to metrics.jsonl in the run directory, which `ballast report` draws, and to "
     "the files of tensorboard and csv_monitor",
     "wandb comet"},
    {"", ignored, "see ballast.checkpoint_every", "checkpoint datastates_ckpt"},
    {"", ignored, "Ballast has its own optimizers, which support states in every tier",
     "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"},
    {"", ignored, "gradients are exchanged in the type of the weights and averaged over all ranks",
     "communication_data_type seq_parallel_communication_data_type seq_parallel_comm_data_type "
     "prescale_gradients gradient_predivide_factor fp32_allreduce disable_allgather"},
    {"", ignored,
     "gradients accumulate in fp32, master weights are fp32; see ballast.optimizer_states",
     "data_types managed_gradient_accumulation coalesce_grad_reduction"},
    {"", ignored, "no training batch is partial", "dataloader_drop_last"},
    {"", ignored, "`ballast plan` and `ballast tune` do this", "autotuning"},
    {"", ignored, "has no equivalent in Ballast",
     "compile dump_state log_level hybrid_engine vocabulary_size "
     "use_data_before_expert_parallelism"},
    {"", ignored, "no Python runs during the steps", "disable_python_gc"},
    {"", ignored, "data moves block by block; there are no buckets", "allgather_size"},
    {"", off_section,
     "is not in Ballast; set bf16.enabled or fp16.enabled for 16-bit weights or remove it",
     "torch_autocast"},
    {"", off_section,
     "is a key of other programs, which train in FP8 with it; Ballast does not. Remove it", "fp8"},
    {"", off_section, "would change training results and is not supported in Ballast; remove it",
     "data_efficiency"},
    {"", on_section, "would change training results and is not supported in Ballast; remove it",
     "weight_quantization"},
    {"", off_section,
     "is a key of this program's own section; remove it and give ballast.expert_parallel",
     "expert_parallel"},
    {"", removed, "Nebula's checkpoints; remove it. ballast.checkpoint_every writes checkpoints",
     "nebula"},
    {"", removed, "the compression library; remove it. Training is not quantised",
     "compression_training"},
    {"", removed, "Apex AMP; remove it. bf16.enabled or fp16.enabled gives 16-bit weights", "amp"},
    {"", removed, "mixture of quantization; remove both of its sections",
     "quantize_training eigenvalue"},
    {"", removed, "the compression of embedding gradients; remove it. Gradients are always dense",
     "sparse_gradients"},
    {"", removed, "sparse attention; remove it. Attention is exact", "sparse_attention"},
    {"", removed,
     "elastic training; remove it and give train_batch_size or "
     "train_micro_batch_size_per_gpu. Checkpoints fit any number of ranks",
     "elasticity"},
    {"", removed, "graph harvesting; remove it", "graph_harvesting"},
    {"", removed, "this curriculum; remove it. The one in data_efficiency is not in Ballast either",
     "curriculum_learning"},
    {"", removed, "progressive layer dropping; remove it", "progressive_layer_drop"},
    {"zero_optimization", ignored, "data moves block by block; there are no buckets",
     "contiguous_gradients reduce_scatter reduce_bucket_size allgather_partitions "
     "allgather_bucket_size use_multi_rank_bucket_allreduce round_robin_gradients "
     "stage3_prefetch_bucket_size prefetch_bucket_size"},
    {"zero_optimization", ignored,
     "transfers overlap with computation; ballast.serial switches that off", "overlap_comm"},
    {"zero_optimization", ignored, "the planner decides what stays resident; see ballast.placement",
     "stage3_model_persistence_threshold model_persistence_threshold stage3_max_live_parameters "
     "max_live_parameters stage3_max_reuse_distance max_reuse_distance "
     "stage3_module_granularity_threshold module_granularity_threshold leaf_module"},
    {"zero_optimization", ignored, "checkpoints fit any number of ranks",
     "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint"},
    {"zero_optimization", ignored, "the weights that a run saves are whole, in fp32",
     "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save "
     "stage3_gather_fp16_weights_on_model_save"},
    {"zero_optimization", removed,
     "MiCS; remove it. zero_hpz_partition_size keeps the gathers of weights inside a group of "
     "ranks",
     "mics_shard_size mics_hierarchical_params_gather"},
    {"zero_optimization", removed, "LoCo for ZeRO++; remove it", "zeropp_loco_param"},
    {"zero_optimization", ignored, "the norm of all gradients is computed in every step",
     "compute_grad_norm"},
    {"zero_optimization", ignored, "every tensor starts on a cache line", "parameter_alignment"},
    {"zero_optimization", ignored, "has no equivalent in Ballast",
     "stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params "
     "stage3_allgather_sequential allgather_sequential ignore_unused_parameters legacy_stage1 "
     "memory_efficient_linear override_module_apply log_trace_cache_warnings enable_sanity_checks "
     "save_muon_momentum_buffer_in_memory"},
    {"zero_optimization", off, "gradients are not quantised in Ballast; set it to false",
     "zero_quantized_gradients"},
    {"zero_optimization", off, "ballast.quantized_base quantises frozen weights; set this to false",
     "zero_quantized_nontrainable_weights"},
    {"zero_optimization", refused,
     "stale updates are not in Ballast: every update uses all gradients of its step; "
     "remove it",
     "zenflow"},
    {"tensor_parallel", ignored,
     "sums between ranks overlap with the products of other micro-batches", "tp_overlap_comm"},
    {"tensor_parallel", ignored, "each family of models describes how its layers are cut",
     "preset_model"},
    {"tensor_parallel", ignored, "bf16.enabled and fp16.enabled give the type", "dtype"},
    {"tensor_parallel", ignored, "a rank reads only its tiles", "keep_module_on_host"},
    {"tensor_parallel", ignored, "Ballast has its own kernels",
     "kernel_inject replace_with_kernel_inject"},
    {"tensor_parallel", refused,
     "each family of models describes how its layers are cut; remove it",
     "partition_config injection_policy_tuple injection_policy"},
    {"tensor_parallel", one,
     "has no effect on training in DeepSpeed; set it to 1 or remove it, and give "
     "tensor_parallel.autotp_size",
     "tp tensor_parallel"},
    {"pipeline", ignored, "layers are dealt to the devices in turn; see ballast.recompute",
     "partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned "
     "use_reentrant"},
    {"offload_optimizer", ignored,
     "host memory is pinned where the device and the system support it", "pin_memory"},
    {"offload_optimizer", ignored, "the plan schedules reads and writes asynchronously",
     "pipeline_read pipeline_write pipeline"},
    {"offload_optimizer", ignored, "see ballast.update_threads", "cpuadam_cores_perc"},
    {"offload_optimizer", ignored, "has no equivalent in Ballast", "fast_init super_offload"},
    {"offload_optimizer", ignored,
     "the planner decides block by block; use device \"auto\" or ballast.placement", "ratio"},
    {"offload_param", ignored, "host memory is pinned where the device and the system support it",
     "pin_memory"},
    {"offload_param", ignored, "a buffer holds one block; ballast.host_bytes limits them all",
     "buffer_size max_in_cpu"},
    {"aio", ignored, "each folder has one I/O queue; see aio.queue_depth",
     "intra_op_parallelism thread_count num_threads single_submit overlap_events"},
    {"aio", ignored, "transfers go through host memory", "use_gds"},
    {"activation_checkpointing", ignored,
     "a layer keeps its intermediates or is recomputed from its input; see ballast.recompute",
     "partitioned_activations number_checkpoints "
     "contiguous_memory_optimization synchronize_checkpoint_boundary profile"},
    {"bf16", ignored,
     "gradients accumulate in fp32 and are always checked for values that are not finite",
     "immediate_grad_update check_grad_overflow"},
    {"bf16", ignored, "bf16 has the range of fp32 and needs no loss scale",
     "loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
     "min_loss_scale auto_cast"},
    {"bf16", off, "master weights are always fp32; set it to false",
     "bf16_master_weights_and_grads"},
    {"bf16", off, "use ballast.optimizer_states instead; set it to false", "bf16_optimizer_states"},
    {"fp16", ignored, "inputs are token ids; the update is Ballast's own", "auto_cast fused_mode"},
    {"fp16", off, "master weights are always fp32; set it to false",
     "fp16_master_weights_and_grads"},
    {"optimizer", ignored, "Ballast has its own optimizers, which support states in every tier",
     "legacy_fusion"},
    {"optimizer.params", ignored,
     "the update is Ballast's own; for moments see ballast.optimizer_states",
     "torch_adam fp32_optimizer_states set_grad_none foreach fused capturable differentiable"},
    {"optimizer.params", off, "AMSGrad is not in Ballast; set it to false", "amsgrad"},
    {"optimizer.params", off, "the loss is minimised; set it to false", "maximize"},
    {"optimizer.params", on, "Adam without bias correction is not in Ballast; set it to true",
     "bias_correction"},
    {"optimizer.params", refused, "is not an optimizer parameter in Ballast; use gradient_clipping",
     "max_grad_norm"},
});

void require_flag(const Value& value, bool wanted, std::string_view sentence) {
  if (value.flag() != wanted) value.fail(std::string(sentence));
}

/// Whether the section has `enabled: true`, or has no such key and is on without it.
bool is_enabled(const Value& value, bool otherwise) {
  if (!value.json().is_object()) value.fail_type("an object");
  const Json* const enabled = value.json().find("enabled");
  if (enabled == nullptr || enabled->is_null()) return otherwise;
  return value.member("enabled").flag();
}

/// Fails for a size above 1: `value`, or the size in the section.
void require_one(const Value& value, std::string_view sentence) {
  if (!value.json().is_object()) {
    constexpr WholeRange kRanks = {0, 1U << 20U};
    if (value.whole(kRanks) > 1) value.fail(std::string(sentence));
    return;
  }
  const Json* const size = value.json().find("tp_size");
  if (size != nullptr && !size->is_null()) require_one(value.member("tp_size"), sentence);
}

void read(const Value& value, const KeyGroup& group, std::vector<std::string>& log) {
  const auto note = [&](std::string_view reason) {
    log.push_back(fmt::format("{}: {}", value.path(), reason));
  };
  switch (group.treatment) {
    case ignored:
      return note(group.sentence);
    case off:
    case on:
      return require_flag(value, group.treatment == on, group.sentence);
    case off_section:
    case on_section:
      if (is_enabled(value, group.treatment == on_section)) value.fail(std::string(group.sentence));
      return note("is off");
    case one:
      require_one(value, group.sentence);
      return note("a size of 1 splits nothing");
    case refused:
      value.fail(std::string(group.sentence));
    case removed:
      value.fail(fmt::format("DeepSpeed 0.19.8 refuses this key, because it no longer has {}",
                             group.sentence));
  }
}

/// `zero_optimization.cpu_offload: true` of old configs becomes `offload_optimizer.device: cpu`.
void map_cpu_offload(Document& document, const std::string& old_name, const std::string& new_name,
                     std::vector<std::string>& log) {
  Json& zero = document.root()["zero_optimization"];
  const Json* const found = zero.find(old_name);
  if (found == nullptr) return;
  const std::string path = "zero_optimization." + old_name;
  const bool wanted = found->is_null() ? false : Value(document, *found, path).flag();
  const Json* const present = zero.find(new_name);
  const bool has_new = present != nullptr && !present->is_null();
  if (wanted && has_new) {
    document.fail(path, fmt::format("deprecated, and '{}' is given too; remove it", new_name));
  }
  zero.erase(old_name);
  if (wanted) zero[new_name] = Json::object({{"device", "cpu"}});
  log.push_back(fmt::format("{}: deprecated; {}", path,
                            wanted ? "read as " + new_name + ".device \"cpu\"" : "it is off"));
}

/// ZeRO was a flag before it had stages.
void map_zero_flag(Document& document, std::vector<std::string>& log) {
  Json* const zero = document.root().find("zero_optimization");
  if (zero == nullptr || !zero->is_boolean()) return;
  const int stage = zero->flag() ? 1 : 0;
  *zero = Json::object({{"stage", stage}});
  log.push_back(fmt::format("zero_optimization: deprecated form; read as stage {}", stage));
}

/// The documentation of transformers puts the section aio inside zero_optimization.
void map_inner_aio(Document& document, std::vector<std::string>& log) {
  Json& root = document.root();
  Json* const zero = root.find("zero_optimization");
  const Json* const inner = zero == nullptr ? nullptr : zero->find("aio");
  if (inner == nullptr) return;
  if (root.find("aio") != nullptr) {
    document.fail("zero_optimization.aio", "'aio' is given too; remove it");
  }
  const Json moved = *inner;
  zero->erase("aio");
  root["aio"] = moved;
  log.push_back("zero_optimization.aio: read as aio");
}

}  // namespace

Section with_deepspeed_keys(Section table, std::string_view section,
                            std::vector<std::string>& log) {
  for (const auto& group : kGroups) {
    if (group.section != section) continue;
    for (const auto name : text::words_of(group.names)) {
      table.push_back(
          {std::string(name), [&group, &log](const Value& value) { read(value, group, log); }, {}});
      table.back().listed = false;
    }
  }
  return table;
}

bool has_no_effect(std::string_view section, std::string_view name) {
  return std::ranges::any_of(kGroups, [&](const KeyGroup& group) {
    return group.section == section && group.treatment == ignored &&
           text::has_word(group.names, name);
  });
}

std::vector<std::string> written_section(const Json& root, const std::string& name) {
  if (root.find(name) != nullptr) return {name};
  const Json* const zero = root.find("zero_optimization");
  if (name == "aio" && zero != nullptr && zero->find("aio") != nullptr) {
    return {"zero_optimization", "aio"};
  }
  if (name == "bf16" && root.find("bfloat16") != nullptr) return {"bfloat16"};
  return {name};
}

void map_deprecated(Document& document, std::vector<std::string>& log) {
  Json& root = document.root();
  if (const Json* const old = root.find("bfloat16")) {
    if (root.find("bf16") != nullptr) document.fail("bfloat16", "'bf16' is given too; remove it");
    root["bf16"] = Json(*old);
    root.erase("bfloat16");
    log.push_back("bfloat16: deprecated; read as bf16");
  }
  map_zero_flag(document, log);
  map_inner_aio(document, log);
  Json* const zero = root.find("zero_optimization");
  if (zero == nullptr || !zero->is_object()) return;
  map_cpu_offload(document, "cpu_offload", "offload_optimizer", log);
  map_cpu_offload(document, "cpu_offload_param", "offload_param", log);
  map_cpu_offload(document, "cpu_offload_params", "offload_param", log);
  if (zero->erase("cpu_offload_use_pin_memory")) {
    log.push_back(
        "zero_optimization.cpu_offload_use_pin_memory: deprecated; host memory is pinned where "
        "the device and the system support it");
  }
}

}  // namespace ballast::config
