#pragma once

#include <span>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "ballast/config/config.h"
#include "ballast/core/error.h"

#include "tests/support/temp_dir.h"

namespace ballast::test {

/// The smallest valid config.
inline const std::string kMinimal = R"({
  "model": {"hidden_size": 64, "num_layers": 2, "num_heads": 4},
  "data": {"text": "corpus.txt", "sequence_length": 32},
  "train_batch_size": 8
})";

/// The smallest config plus `more`, a list of members: `"steps_per_print": 5`.
inline std::string with(const std::string& more) {
  return kMinimal.substr(0, kMinimal.size() - 2) + ",\n  " + more + "\n}";
}

/// "AdamW, Adam": all values of optimizer.type.
inline std::string optimizer_titles() {
  std::vector<std::string> titles;
  for (const cpu_adam::OptimizerRow& row : cpu_adam::kOptimizers) titles.emplace_back(row.title);
  return listed(titles);
}

/// One config of every shape: all sections, all schedules, all kinds of values.
inline std::vector<std::string> samples() {
  return {
      kMinimal,
      with(R"("train_micro_batch_size_per_gpu": "auto")"),
      with(R"("tensorboard": {"enabled": true, "output_path": "logs", "job_name": "a/b"},
                  "csv_monitor": {"enabled": true, "output_path": null}, "wandb": {"group": "x"})"),
      with(R"("bf16": {"enabled": false}, "gradient_clipping": 0, "steps_per_print": 10)"),
      with(R"("fp16": {"enabled": true, "loss_scale": 64, "initial_scale_power": 8,
                  "loss_scale_window": 500, "hysteresis": 1, "consecutive_hysteresis": true,
                  "min_loss_scale": 0.5, "auto_cast": false})"),
      with(R"("optimizer": {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.8, 0.99],
                  "eps": 1e-6, "weight_decay": 0, "torch_adam": true, "bias_correction": true}})"),
      with(R"("optimizer": {"type": "Adam", "params": {"adam_w_mode": false, "lr": 1e-3}})"),
      with(R"("optimizer": {"type": "Adagrad", "params": {"lr": 0.1, "eps": 1e-6,
                  "weight_decay": 0.01, "lr_decay": 0}}, "ballast": {"optimizer_states": "8bit"})"),
      with(R"("optimizer": {"type": "Lion", "params": {"betas": [0.95, 0.98]}},
                  "ballast": {"optimizer_states": "bf16_first", "update_numa_node": 1})"),
      with(R"("optimizer": {"type": "SGD", "params": {"momentum": 0.9, "nesterov": true,
                  "dampening": 0}}, "ballast": {"update_numa_node": "auto"})"),
      with(R"("scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-6,
                  "warmup_max_lr": 1e-3, "warmup_num_steps": 7, "warmup_type": "linear"}})"),
      with(R"("scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100}})"),
      with(R"("scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 100,
                  "warmup_min_ratio": 0.1, "cos_min_ratio": 0.01}})"),
      with(R"("zero_optimization": {"stage": 3, "overlap_comm": true, "reduce_bucket_size": 5e8,
                  "offload_optimizer": {"device": "nvme", "nvme_path": "swap", "buffer_count": 4,
                  "pin_memory": true}, "offload_param": {"device": "auto"}},
                  "aio": {"block_size": "512 KiB", "queue_depth": 8, "intra_op_parallelism": 2,
                  "backend": "threads"})"),
      with(R"("zero_optimization": {"offload_optimizer": {"device": "nvme",
                  "nvme_path": ["/a", "b"]}, "offload_param": {"nvme_path": ["c/"]}},
                  "aio": {"block_size": "512 KiB", "in_flight_bytes": "8 MiB", "sqpoll": true,
                  "stall_seconds": 0.5, "abandon_seconds": 5, "buffered": true,
                  "any_file_system": true, "paths": [{"path": "b", "queue_depth": 4,
                  "read_gbps": 3.5, "write_gbps": 1e-3}, {"path": "/a"}]})"),
      with(
          R"("ballast": {"device": "host", "attention": "own", "device_bytes": "1.5GiB", "host_bytes": "auto",
                  "order": "micro_batch_major", "serial": true, "activations": "host", "recompute": "auto",
                  "compute_threads": 2, "update_threads": "auto", "update_isa": "avx2",
                  "link_gbps": 12.5, "steps": 100, "seed": 18446744073709551615,
                  "placement": [{"blocks": "all", "weights": "cpu"},
                  {"blocks": "1-2", "optimizer": "nvme"}, {"blocks": 0, "weights": "device"},
                  {"blocks": 1, "recompute": false}],
                  "out": "run"})"),
      R"({ // a comment
  "model": {"family": "llama", "vocab_size": 32000, "hidden_size": 96, "num_layers": 3,
            "num_heads": 6, "num_kv_heads": 2, "tie_embeddings": true, "weights": "w.safetensors",
            "rope_scaling": {"rope_type": "linear", "factor": 4}},
  "data": {"tokens": ["a.bin", "/b/*.bin"], "token_type": "u32", "sequence_length": 128,
           "held_out": 0, "shuffle": false},
  "train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2,
  "gradient_accumulation_steps": 4, /* another */ "wall_clock_breakdown": true
})"};
}

inline config::Config parse_text(const std::string& text,
                                 const std::vector<std::string>& overrides = {},
                                 std::uint64_t world = 1) {
  return config::parse(text, "/base", "c.json", overrides, world);
}

/// The message of the Error(config) that parsing `text` throws; "" when it throws none.
inline std::string error_of(const std::string& text, const std::vector<std::string>& overrides = {},
                            std::uint64_t world = 1) {
  try {
    parse_text(text, overrides, world);
  } catch (const Error& error) {
    return error.category() == ErrorCategory::config ? error.what() : "not a config error";
  }
  return "";
}

/// The paths at the beginning of the lines "PATH: REASON".
inline std::vector<std::string> paths_of(const std::vector<std::string>& lines) {
  std::vector<std::string> paths;
  for (const auto& line : lines) paths.push_back(line.substr(0, line.find(": ")));
  return paths;
}

/// The paths of the keys that were ignored.
inline std::vector<std::string> ignored_paths(const config::Config& config) {
  return paths_of(config.ignored);
}

/// The config of a folder with `file` as its config.json. `parts`: ranks that share sequences.
inline config::Config read(const nlohmann::json& file, std::uint64_t parts = 1) {
  const TempDir dir;
  dir.write("m/config.json", file.dump());
  const nlohmann::json config = {{"model", {{"path", "m"}}},
                                 {"data", {{"text", "t"}, {"sequence_length", 32}}},
                                 {"sequence_parallel_size", parts},
                                 {"train_batch_size", 1}};
  return config::parse(config.dump(), dir.path(), "c.json", {}, parts);
}

/// The message of the error that read() throws; "" when it throws none.
inline std::string refusal(const nlohmann::json& file, std::uint64_t parts = 1) {
  try {
    read(file, parts);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

/// The model section that a config prints, without the weights' path.
inline nlohmann::json section_of(const config::Config& config) {
  nlohmann::json section = nlohmann::json::parse(config::print(config)).at("model");
  section.erase("weights");
  return section;
}

}  // namespace ballast::test
