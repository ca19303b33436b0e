#include "src/config/key_table.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace ballast::config {
namespace {

constexpr RealRange kHeldOut = {.low = 0.0, .high = 0.5};
constexpr double kInfinite = std::numeric_limits<double>::infinity();

/// Files, or a share like held_out. With files, none of the training data is held out by default.
Key eval_key(DataSection& d) {
  Key key = path_list("eval", d.eval);
  key.read = [read = std::move(key.read), &d](const Value& value) {
    if (value.json().is_number()) {
      d.held_out = value.real(kHeldOut);
      return;
    }
    if (!value.json().is_string() && !value.json().is_array()) {
      value.fail_type("a share of the data, a path or an array of paths");
    }
    read(value);
    if (!d.eval.empty()) d.held_out = 0.0;
  };
  return key;
}

/// Must be read after eval.
Key held_out_key(DataSection& d) {
  return {"held_out",
          [&d](const Value& value) {
            const double share = value.real(kHeldOut);
            if (share != 0.0 && !d.eval.empty()) {
              value.fail("data.eval names files for evaluation; give one of them");
            }
            d.held_out = share;
          },
          [&d] { return Json(d.held_out); }};
}

Section data_keys(DataSection& d) {
  return {row(kResultsOnly, path_list("text", d.text),
              {"files, folders or globs, read byte by byte", "none",
               "path or list of paths; exactly one of `text`, `tokens`, `documents` and `pairs`"}),
          row(kResultsOnly, path_list("tokens", d.tokens),
              {"token files, read as one stream: Megatron (`.bin` with its `.idx` next to it), "
               "llm.c, NumPy (`.npy`) or headerless; detected by content",
               "none", "path or list of paths"}),
          row(kResultsOnly, path_list("documents", d.documents),
              {"files of documents, made by `tools/prepare.py`; packed, see "
               "[documents and packing](data.md#documents-and-packing)",
               "none", "path or list of paths"}),
          row(kResultsOnly, path_list("pairs", d.pairs),
              {"files of preference pairs, made by `tools/prepare.py --pairs`: direct preference "
               "optimization (DPO) of adapters, see [preference pairs](data.md#preference-pairs)",
               "none", "path or list of paths"}),
          row(kNeither, choice("token_type", d.token_type),
              {"type of a token in headerless files, little-endian. `auto`: `u16` if "
               "`model.vocab_size` is at most 65536, else `u32`. Other files name their type; a "
               "contradiction is an error",
               "`auto`", "`auto`, `u16`, `u32`"}),
          row(kPositionAndPlan,
              also_called(whole("sequence_length", d.sequence_length, {1, 1U << 30U}),
                          {"seq_len", "block_size", "context_length"}),
              {"tokens per sequence", "required", "1 to 2^30"}),
          row(kNeither, eval_key(d),
              {"evaluation data: files of the same kind as the training data, or a share like "
               "`held_out`. Loss and perplexity of the first `ballast.eval_batches` micro-batches "
               "are reported",
               "none", "path, list of paths, or 0 to 0.5"}),
          row(kResultsOnly, held_out_key(d),
              {"share of the tokens (documents: of the last whole documents) at the end of the "
               "data that is kept for evaluation. Less than one sequence plus one token, or one "
               "document, gives a warning and no evaluation",
               "0.05; 0 with files in `eval`", "0 to 0.5"}),
          row(kResultsOnly, flag("shuffle", d.shuffle),
              {"draw sequences in random order", "true", "true, false"}),
          row(kNeither, flag("as_is", d.as_is),
              {"read the files as their keys say, without checking format and tokenizer, see "
               "[checks of the data](data.md#checks-of-the-data)",
               "false", "true, false"})};
}

Section bf16_keys(Config& c) {
  Key enabled = {"enabled",
                 [&c](const Value& value) { c.type = value.flag() ? DType::bf16 : DType::f32; },
                 [&c] { return Json(c.type == DType::bf16); }};
  return with_deepspeed_keys(
      {row(kResultsAndPlan, with_values(std::move(enabled), {"true", "false"}),
           {"bf16 weights and gradients, fp32 master weights; false: everything in fp32, unless "
            "fp16 is on. DeepSpeed's default is false",
            "true; false with `fp16.enabled`", "true, false"})},
      "bf16", c.ignored);
}

Section fp16_keys(Config& c) {
  Fp16Section& f = c.fp16;
  Key enabled = {"enabled",
                 [&c](const Value& value) {
                   if (value.flag()) c.type = DType::f16;
                 },
                 [&c] { return Json(c.type == DType::f16); }};
  return with_deepspeed_keys(
      {row(kResultsAndPlan, with_values(std::move(enabled), {"true", "false"}),
           {"fp16 weights, activations and gradients, fp32 master weights, with a [loss "
            "scale](fine-tuning.md#loss-scale)",
            "false", "true, false"}),
       row(kResultsAndPlan, real("loss_scale", f.loss_scale, kNotNegative),
           {"constant loss scale; 0: dynamic", "0", "at least 0"}),
       row(kResultsAndPlan, whole("initial_scale_power", f.initial_scale_power, {0, 63}),
           {"a dynamic scale begins with 2 to this power", "16", "0 to 63"}),
       row(kResultsAndPlan, whole("loss_scale_window", f.loss_scale_window, {1, kSteps.high}),
           {"number of good steps in a row before the next one doubles the scale", "1000",
            "at least 1"}),
       row(kResultsAndPlan, whole("hysteresis", f.hysteresis, {1, kSteps.high}),
           {"number of overflows that halve the scale; restored when the scale is doubled", "2",
            "at least 1"}),
       row(kResultsAndPlan, flag("consecutive_hysteresis", f.consecutive_hysteresis),
           {"every good step restores the hysteresis", "false", "true, false"}),
       row(kResultsAndPlan, real("min_loss_scale", f.min_loss_scale, kPositive),
           {"an overflow at this scale ends the run with an error. At most the first scale", "1",
            "above 0"})},
      "fp16", c.ignored);
}

/// `enabled` and `folder`: what the keys "enabled" and "job_name" mean.
Section monitor_keys(MonitorSection& monitor, std::string_view enabled, std::string_view folder) {
  Key name = {"job_name",
              [&monitor](const Value& value) {
                const std::filesystem::path folder = value.text();
                if (folder.empty() || folder.is_absolute()) {
                  value.fail("expected the name of a folder in output_path");
                }
                monitor.job_name = folder.string();
              },
              [&monitor] { return Json(monitor.job_name); }};
  return {
      row(kNeither, flag("enabled", monitor.enabled), {enabled, "false", "true, false"}),
      row(kNeither, path("output_path", monitor.output_path),
          {"parent of `job_name`", "the run directory (DeepSpeed: the current one)", "path"}),
      row(kNeither, std::move(name), {folder, "`\"DeepSpeedJobName\"`", "path in `output_path`"})};
}

Section activation_checkpointing_keys(Config& c) {
  // DeepSpeed's name for ballast.activations "host", which print() writes.
  Key on_host = {"cpu_checkpointing",
                 [&c](const Value& value) {
                   if (value.flag()) c.ballast.activations = Tier::host;
                 },
                 [] { return Json(false); }};
  return with_deepspeed_keys(
      {row(kPlanOnly, accepted_only(std::move(on_host)),
           {"DeepSpeed's name for `ballast.activations`: `host`", "false", "true, false"}),
       row(kPlanOnly, flag("partition_activations", c.partition_activations),
           {"each of the ranks of `tensor_parallel` stores a part of the inputs of layers, see "
            "[tensor parallelism](many-cards.md#tensor-parallelism)",
            "false", "true, false"})},
      "activation_checkpointing", c.ignored);
}

Key gradient_allreduce_op_key() {
  return {"gradient_allreduce_op",
          [](const Value& value) {
            if (value.text() != "mean") value.fail("gradients are averaged; use \"mean\"");
          },
          {}};
}

/// Accelerate writes an infinite number to switch progress lines off.
Key steps_per_print_key(std::uint64_t& steps) {
  Key key = whole("steps_per_print", steps, {1, kNoProgressLines});
  key.read = [read = std::move(key.read), &steps](const Value& value) {
    const Json& json = value.json();
    const bool written = json == "inf" || json == "Infinity";
    if (!written && !(json.is_number() && json.number() == kInfinite)) return read(value);
    steps = kNoProgressLines;
  };
  return key;
}

Key batch_key(std::string name, std::uint64_t& target) {
  return or_auto(whole(std::move(name), target, {1, std::uint64_t{1} << 32U}), target);
}

/// A batch key that the planner may choose: "auto" is read and printed as "auto".
Key planned_batch_key(std::string name, std::uint64_t& target, bool& automatic) {
  Key key = batch_key(std::move(name), target);
  key.read = [read = std::move(key.read), &automatic](const Value& value) {
    if (value.is_auto()) automatic = true;
    read(value);
  };
  key.write = [write = std::move(key.write), &automatic] {
    return automatic ? Json("auto") : write();
  };
  return key;
}

Section batch_keys(BatchSection& batch) {
  return {
      row(kPositionAndPlan, batch_key("train_batch_size", batch.train_batch),
          {"sequences per step, all ranks together", "derived", "1 to 2^32, `\"auto\"`"}),
      row(kPlanOnly,
          planned_batch_key("train_micro_batch_size_per_gpu", batch.micro_batch, batch.automatic),
          {"sequences per micro-batch and rank", "derived", "1 to 2^32, `\"auto\"`"}),
      row(kPlanOnly,
          planned_batch_key("gradient_accumulation_steps", batch.accumulation, batch.automatic),
          {"micro-batches per step and rank", "derived, else 1", "1 to 2^32, `\"auto\"`"})};
}

}  // namespace

Section all_keys(Config& c) {
  return with_deepspeed_keys(
      joined(
          {{row(kResultsAndPlan, section("model", [&c] { return model_keys(c); }), {}),
            section("data", [&c] { return data_keys(c.data); })},
           batch_keys(c.batch),
           {section("optimizer", [&c] { return optimizer_keys(c.optimizer, c.ignored); }),
            row(kResultsOnly, section("scheduler", [&c] { return scheduler_keys(c.scheduler); }),
                {}),
            row(kPlanOnly,
                also_called(whole("sequence_parallel_size", c.sequence_parallel, {0, 1U << 16U}),
                            {"sp_size", "context_parallel_size", "ulysses_sequence_parallel_size"}),
                {"number of ranks that share each sequence (Ulysses), see "
                 "[sequence parallelism](many-cards.md#sequence-parallelism)",
                 "1 (or 0): each rank has whole sequences",
                 "a divisor of the ranks, of the heads of keys and of `data.sequence_length`"}),
            section("tensor_parallel",
                    [&c] { return tensor_parallel_keys(c.tensor_parallel, c.ignored); }),
            row(kResultsAndPlan, real("gradient_clipping", c.gradient_clipping, kNotNegative),
                {"upper bound of the gradient's global L2 norm; 0: no clipping", "1.0",
                 "at least 0"}),
            row(kNeither, steps_per_print_key(c.steps_per_print),
                {"steps between progress lines; `Infinity` (as Accelerate writes it) or `\"inf\"`: "
                 "no "
                 "such lines",
                 "1", "1 to 2^40, `Infinity`"}),
            switched_section(
                "tensorboard",
                [&c] {
                  return monitor_keys(c.tensorboard,
                                      "write an event file for TensorBoard, see "
                                      "[monitors](reading-a-run.md#monitors)",
                                      "folder of the event files");
                },
                c.ignored),
            switched_section(
                "csv_monitor",
                [&c] {
                  return monitor_keys(c.csv_monitor,
                                      "write the same values as CSV files, see "
                                      "[monitors](reading-a-run.md#monitors)",
                                      "folder of the CSV files");
                },
                c.ignored),
            switched_section(
                "bf16", [&c] { return bf16_keys(c); }, c.ignored),
            row(kResultsAndPlan,
                switched_section(
                    "fp16", [&c] { return fp16_keys(c); }, c.ignored),
                {}),
            section("zero_optimization", [&c] { return zero_keys(c.zero, c.buffers, c.ignored); }),
            section("pipeline", [&c] { return pipeline_keys(c.pipeline, c.ignored); }),
            section("aio", [&c] { return aio_keys(c.aio, c.ignored); }),
            section("activation_checkpointing", [&c] { return activation_checkpointing_keys(c); }),
            section("ballast", [&c] { return ballast_keys(c.ballast, c.buffers); }),
            row(kResultsAndPlan, gradient_allreduce_op_key(),
                {"accepted for configs of DeepSpeed: gradients are averaged over the ranks",
                 "`mean`", "`mean`"})}}),
      "", c.ignored);
}

std::vector<KeyInfo> key_rows() {
  Config config;
  std::vector<KeyInfo> rows;
  list_keys(all_keys(config), "", rows);
  for (KeyInfo& row : rows) name_families(row);
  return rows;
}

std::vector<KeyInfo> key_list() {
  std::vector<KeyInfo> keys = key_rows();
  std::erase_if(keys, [](const KeyInfo& key) { return key.is_section; });
  return keys;
}

}  // namespace ballast::config
