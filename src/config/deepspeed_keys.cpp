
#include <fmt/format.h>

#include "src/config/sections.h"

namespace ballast::config {
namespace {

enum class Treatment {
  ignored,      ///< any value is accepted and noted with the sentence
  off,          ///< false is accepted, true is an error with the sentence
  on,           ///< true is accepted, false is an error with the sentence
  off_section,  ///< an object whose `enabled` is off, its other keys ignored
  refused       ///< an error with the sentence, whatever the value
};

struct Group {
  std::string_view section;
  Treatment treatment;
  std::string_view sentence;
  std::vector<std::string_view> names;
};

using enum Treatment;

// The names are those of DeepSpeed 0.19 (runtime/config.py, runtime/constants.py,
// runtime/zero/config.py and related files).
Group group(std::string_view section, Treatment treatment, std::string_view sentence,
            std::vector<std::string_view> names) {
  return {section, treatment, sentence, std::move(names)};
}

const std::vector<Group> kGroups = {
    group("", ignored,
          "metrics.jsonl has the times, traffic and memory of each step; --trace shows its "
          "operations",
          {"wall_clock_breakdown", "memory_breakdown", "timers", "flops_profiler", "comms_logger"}),
    group("", ignored,
          "metrics go to metrics.jsonl in the run directory, which `ballast report` draws, and to "
          "the files of tensorboard and csv_monitor",
          {"wandb", "comet"}),
    group("", ignored, "see ballast.checkpoint_every", {"checkpoint", "nebula", "datastates_ckpt"}),
    group("", ignored, "Ballast has its own optimizers, which support states in every tier",
          {"zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"}),
    group("", ignored,
          "gradients are exchanged in the type of the weights and averaged over all ranks",
          {"communication_data_type", "seq_parallel_comm_data_type", "prescale_gradients",
           "gradient_predivide_factor", "sparse_gradients", "disable_allgather"}),
    group("", ignored,
          "gradients accumulate in fp32, master weights are fp32; see ballast.optimizer_states",
          {"data_types", "managed_gradient_accumulation", "coalesce_grad_reduction"}),
    group("", ignored, "no training batch is partial", {"dataloader_drop_last"}),
    group("", ignored, "`ballast plan` and `ballast tune` do this", {"autotuning"}),
    group("", ignored, "has no equivalent in Ballast",
          {"compile", "dump_state", "log_level", "hybrid_engine", "graph_harvesting", "pipeline",
           "vocabulary_size", "use_data_before_expert_parallelism"}),
    group(
        "", off_section,
        "is not in this version; set bf16.enabled or fp16.enabled for 16-bit weights or remove it",
        {"amp", "torch_autocast"}),
    group("", off_section,
          "would change training results and is not supported in this version; remove it",
          {"curriculum_learning", "data_efficiency", "progressive_layer_drop", "quantize_training",
           "eigenvalue", "elasticity"}),
    group("", refused,
          "would change training results and is not supported in this version; remove it",
          {"compression_training", "sparse_attention", "weight_quantization"}),
    group("", refused, "splitting the model inside a layer is not in this version; remove it",
          {"tensor_parallel", "sequence_parallel_size"}),
    group("", refused, "is a key of this program's own section; give ballast.expert_parallel",
          {"expert_parallel"}),
    group("zero_optimization", ignored, "data moves block by block; there are no buckets",
          {"contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "allgather_partitions",
           "allgather_bucket_size", "use_multi_rank_bucket_allreduce", "round_robin_gradients",
           "stage3_prefetch_bucket_size", "prefetch_bucket_size"}),
    group("zero_optimization", ignored,
          "transfers overlap with computation; ballast.serial switches that off", {"overlap_comm"}),
    group("zero_optimization", ignored,
          "the planner decides what stays resident; see ballast.placement",
          {"stage3_model_persistence_threshold", "model_persistence_threshold",
           "stage3_max_live_parameters", "max_live_parameters", "stage3_max_reuse_distance",
           "max_reuse_distance", "stage3_module_granularity_threshold",
           "module_granularity_threshold", "leaf_module"}),
    group("zero_optimization", ignored, "checkpoints fit any number of ranks",
          {"load_from_fp32_weights", "elastic_checkpoint", "pipeline_loading_checkpoint"}),
    group("zero_optimization", ignored, "the weights that a run saves are whole, in fp32",
          {"stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save",
           "stage3_gather_fp16_weights_on_model_save"}),
    group("zero_optimization", ignored,
          "states are split over all ranks; for weights see zero_hpz_partition_size",
          {"mics_shard_size", "mics_hierarchical_params_gather"}),
    group("zero_optimization", ignored, "has no equivalent in Ballast",
          {"stage3_use_all_reduce_for_fetch_params", "use_all_reduce_for_fetch_params",
           "stage3_allgather_sequential", "allgather_sequential", "ignore_unused_parameters",
           "legacy_stage1", "memory_efficient_linear", "override_module_apply",
           "log_trace_cache_warnings", "enable_sanity_checks",
           "save_muon_momentum_buffer_in_memory", "zeropp_loco_param"}),
    group("zero_optimization", off, "gradients are not quantised in this version; set it to false",
          {"zero_quantized_gradients"}),
    group("zero_optimization", off, "all weights are trained; set it to false",
          {"zero_quantized_nontrainable_weights"}),
    group("zero_optimization", refused,
          "stale updates are not in this version: every update uses all gradients of its step; "
          "remove it",
          {"zenflow"}),
    group("offload_optimizer", ignored,
          "host memory is pinned where the device and the system support it", {"pin_memory"}),
    group("offload_optimizer", ignored, "the plan schedules reads and writes asynchronously",
          {"pipeline_read", "pipeline_write", "pipeline"}),
    group("offload_optimizer", ignored, "see ballast.update_threads", {"cpuadam_cores_perc"}),
    group("offload_optimizer", ignored, "has no equivalent in Ballast",
          {"fast_init", "super_offload"}),
    group("offload_optimizer", ignored,
          "the planner decides block by block; use device \"auto\" or ballast.placement",
          {"ratio"}),
    group("offload_param", ignored,
          "host memory is pinned where the device and the system support it", {"pin_memory"}),
    group("offload_param", ignored, "a buffer holds one block; ballast.host_bytes limits them all",
          {"buffer_size", "max_in_cpu"}),
    group(
        "aio", ignored, "each folder has one I/O queue; see aio.queue_depth",
        {"intra_op_parallelism", "thread_count", "num_threads", "single_submit", "overlap_events"}),
    group("aio", ignored, "transfers go through host memory", {"use_gds"}),
    group("activation_checkpointing", ignored,
          "a layer keeps its intermediates or is recomputed from its input; see ballast.recompute",
          {"partition_activations", "number_checkpoints", "contiguous_memory_optimization",
           "synchronize_checkpoint_boundary", "profile"}),
    group("bf16", ignored,
          "gradients accumulate in fp32 and are always checked for values that are not finite",
          {"immediate_grad_update", "check_grad_overflow"}),
    group("bf16", off, "master weights are always fp32; set it to false",
          {"bf16_master_weights_and_grads"}),
    group("bf16", off, "use ballast.optimizer_states instead; set it to false",
          {"bf16_optimizer_states"}),
    group("fp16", ignored, "inputs are token ids; the update is Ballast's own",
          {"auto_cast", "fused_mode"}),
    group("fp16", off, "master weights are always fp32; set it to false",
          {"fp16_master_weights_and_grads"}),
    group("optimizer", ignored,
          "Ballast has its own optimizers, which support states in every tier", {"legacy_fusion"}),
    group("optimizer.params", ignored,
          "the update is Ballast's own; for moments see ballast.optimizer_states",
          {"torch_adam", "fp32_optimizer_states", "set_grad_none"}),
    group("optimizer.params", off, "AMSGrad is not in this version; set it to false", {"amsgrad"}),
    group("optimizer.params", on,
          "Adam without bias correction is not in this version; set it to true",
          {"bias_correction"}),
    group("optimizer.params", refused,
          "is not an optimizer parameter in Ballast; use gradient_clipping", {"max_grad_norm"})};

void require_flag(const Value& value, bool wanted, std::string_view sentence) {
  if (value.flag() != wanted) value.fail(std::string(sentence));
}

void read(const Value& value, const Group& group, std::vector<std::string>& log) {
  switch (group.treatment) {
    case ignored:
      log.push_back(fmt::format("{}: {}", value.path(), group.sentence));
      return;
    case off:
    case on:
      require_flag(value, group.treatment == on, group.sentence);
      return;
    case off_section:
      if (!value.json().is_object()) value.fail_type("an object");
      if (value.json().find("enabled") != nullptr) {
        require_flag(value.member("enabled"), false, group.sentence);
      }
      return;
    case refused:
      value.fail(std::string(group.sentence));
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

/// The documentation of transformers has the section aio inside zero_optimization.
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
    for (const auto name : group.names) {
      table.push_back(
          {std::string(name), [&group, &log](const Value& value) { read(value, group, log); }, {}});
    }
  }
  return table;
}

void map_deprecated(Document& document, std::vector<std::string>& log) {
  Json& root = document.root();
  if (const Json* const old = root.find("bfloat16")) {
    if (root.find("bf16") != nullptr) document.fail("bfloat16", "'bf16' is given too; remove it");
    root["bf16"] = Json(*old);
    root.erase("bfloat16");
    log.push_back("bfloat16: deprecated; read as bf16");
  }
  map_inner_aio(document, log);
  Json* const zero = root.find("zero_optimization");
  if (zero == nullptr || !zero->is_object()) return;
  map_cpu_offload(document, "cpu_offload", "offload_optimizer", log);
  map_cpu_offload(document, "cpu_offload_param", "offload_param", log);
  if (zero->erase("cpu_offload_use_pin_memory")) {
    log.push_back(
        "zero_optimization.cpu_offload_use_pin_memory: deprecated; host memory is pinned where "
        "the device and the system support it");
  }
}

}  // namespace ballast::config
