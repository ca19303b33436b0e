#include <algorithm>
#include <charconv>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include <fmt/format.h>

#include "ballast/core/error.h"

#include "src/config/key_table.h"

namespace ballast::config {
namespace {

/// `text` as a block number; empty if it is not one.
std::optional<std::uint64_t> block_number(std::string_view text) {
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool whole_text = end == text.data() + text.size();
  return error == std::errc() && whole_text ? std::optional(number) : std::nullopt;
}

void read_blocks(const Value& value, step::PlacementRule& rule) {
  if (value.json().is_number()) {
    rule.first_block = rule.last_block = value.whole({});
    return;
  }
  const std::string_view expected = "a block number, a range such as \"0-3\" or \"all\"";
  if (!value.json().is_string()) value.fail_type(expected);
  const std::string text = value.json().text();
  if (text == "all") {
    rule.first_block = 0;
    rule.last_block = std::numeric_limits<std::uint64_t>::max();  // complete() replaces it
    return;
  }
  const std::size_t dash = text.find('-');
  const auto first = block_number(std::string_view(text).substr(0, dash));
  const auto last =
      dash == std::string::npos ? first : block_number(std::string_view(text).substr(dash + 1));
  if (!first || !last) value.fail_type(expected);
  if (*first > *last) value.fail(fmt::format("the range {} ends before it starts", text));
  rule.first_block = *first;
  rule.last_block = *last;
}

using Choices = std::vector<std::string>;
const Choices kTierChoices = {"device", "host", "nvme", "cpu"};
const Choices kBelowDevice = {"host", "nvme", "cpu"};

Key rule_tier(std::string name, std::optional<Tier>& tier, const Choices& choices = kTierChoices) {
  const auto read = [&tier, &choices](const Value& value) {
    const std::string found = value.choice(choices);
    tier = found == "device" ? Tier::device : found == "nvme" ? Tier::nvme : Tier::host;
  };
  return with_values(
      {std::move(name), read, [&tier] { return tier ? Json(to_string(*tier)) : Json(); }}, choices);
}

bool read_flag(const Value& value) {
  return value.flag();
}

/// `recompute`: true, false, or "except_attention".
Key recompute_key(std::optional<step::Kept>& kept, const Json& missing) {
  constexpr const char* kAttention = "except_attention";
  const auto read = [&kept, missing](const Value& value) {
    kept.reset();
    if (value.is_auto() && !missing.is_null()) return;
    if (value.json() == kAttention) {
      kept = step::Kept::attention;
    } else if (value.json().is_boolean()) {
      kept = value.flag() ? step::Kept::nothing : step::Kept::all;
    } else {
      value.fail_type("true, false or \"except_attention\"");
    }
  };
  const auto write = [&kept, missing] {
    if (!kept) return missing;
    return *kept == step::Kept::attention ? Json(kAttention) : Json(*kept == step::Kept::nothing);
  };
  return with_values({"recompute", read, write}, {"auto", "true", "false", kAttention});
}

Section rule_keys(step::PlacementRule& rule) {
  const auto write_blocks = [&rule] {
    if (rule.first_block == rule.last_block) return Json(rule.first_block);
    return Json(fmt::format("{}-{}", rule.first_block, rule.last_block));
  };
  return {{"blocks", [&rule](const Value& value) { read_blocks(value, rule); }, write_blocks},
          rule_tier("weights", rule.weights),
          rule_tier("optimizer", rule.optimizer),
          rule_tier("activations", rule.activations),
          rule_tier("gradients", rule.gradients, kBelowDevice),
          recompute_key(rule.kept, {})};
}

Key placement_key(std::vector<step::PlacementRule>& rules) {
  const auto read = [&rules](const Value& value) {
    rules.clear();
    for (const Value& item : value.elements("an array of rules")) {
      step::PlacementRule rule;
      read_section(item, rule_keys(rule));
      if (item.json().find("blocks") == nullptr) item.fail("lacks \"blocks\"; add it");
      if (!rule.weights && !rule.optimizer && !rule.activations && !rule.gradients && !rule.kept) {
        item.fail(
            "has no effect; add \"weights\", \"optimizer\", \"activations\", \"gradients\" or "
            "\"recompute\"");
      }
      rules.push_back(rule);
    }
  };
  const auto write = [&rules] {
    Json out = Json::array();
    for (auto& rule : rules) out.push_back(write_section(rule_keys(rule)));
    return out;
  };
  return {"placement", read, write};
}

/// A tier or "auto".
Key tier_key(Key key, TierChoice& tier) {
  key.read = [read = std::move(key.read), &tier](const Value& value) {
    tier.reset();
    if (!value.is_auto()) read(value);
  };
  key.write = [&tier] { return tier ? Json(to_string(*tier)) : Json("auto"); };
  key.values.emplace_back("auto");
  return key;
}

Key flag_or_auto(const char* name, std::optional<bool>& choice) {
  return with_values(optional_key<bool>(name, choice, "auto", read_flag),
                     {"auto", "true", "false"});
}

Key whole_or(const char* name, std::optional<std::uint64_t>& target, const Json& missing,
             WholeRange range) {
  return optional_key<std::uint64_t>(name, target, missing,
                                     [range](const Value& value) { return value.whole(range); });
}

Key numa_node_key(std::optional<int>& node) {
  return optional_key<int>("update_numa_node", node, "auto", [](const Value& value) {
    return static_cast<int>(value.whole({0, 1023}));
  });
}

constexpr WholeRange kBudget = {1, std::uint64_t{1} << 53U};
constexpr WholeRange kThreads = {0, 4096};
constexpr WholeRange kAnyNumber = {0, std::numeric_limits<std::uint64_t>::max()};

Section machine_keys(BallastSection& b) {
  return {
      row(kPlanOnly, choice("device", b.device),
          {"device that computes",
           "`auto`: the GPU, or `host` if there is none, see [device and "
           "memory](memory.md#device-and-memory)",
           "`auto`, `host`, `cuda`"}),
      row(kPlanOnly, choice("kernels", b.kernels),
          {"kernels of device `cuda`. `plain`: Ballast's simplest ones, for [finding "
           "faults](reading-a-run.md#finding-faults-on-a-gpu), 10 to 50 times slower. Results "
           "differ in bits",
           "`auto`: the fastest", "`auto`, `plain`"}),
      row(kPlanOnly, choice("gpu_checks", b.gpu_checks),
          {"`each`: device `cuda` waits for every kernel and checks the results of every pass, see "
           "[finding faults on a GPU](reading-a-run.md#finding-faults-on-a-gpu). Same bits",
           "`off`", "`off`, `each`"}),
      row(kPlanOnly, choice("attention", b.attention),
          {"attention kernels of the bf16 forward pass on device `cuda`: Ballast's `own`, or those "
           "of `cudnn` 9.10.2 or newer. Results differ in bits. The backward pass and fp32 always "
           "use Ballast's",
           "`auto`: cuDNN if it is available and its first execution succeeds",
           "`auto`, `own`, `cudnn`"}),
      row(kPlanOnly, choice("product_algorithms", b.product_algorithms),
          {"how device `cuda` chooses among cuBLASLt's algorithms for matrix products, see "
           "[matrix products on a GPU](memory.md#matrix-products-on-a-gpu)",
           "`auto`: `timed` where the choices can be kept", "`auto`, `heuristic`, `timed`"}),
      row(kPlanOnly, devices_key(b.devices),
          {"GPU numbers of a rank's devices, see [several devices](many-cards.md#several-devices). "
           "Same bits",
           "`\"auto\"`: consecutive ones", "list of 1 to 8 numbers, `\"auto\"`"}),
      row(kPlanOnly, or_auto(bytes("device_bytes", b.device_bytes, kBudget), b.device_bytes),
          {"budget of device memory of each device, in bytes",
           "`auto`: the free memory of a GPU, 40% of the available memory on the host device, see "
           "[device and memory](memory.md#device-and-memory)",
           "size, `\"auto\"`"}),
      row(kPlanOnly, or_auto(bytes("host_bytes", b.host_bytes, kBudget), b.host_bytes),
          {"budget of host memory per rank, in bytes",
           "`auto`: 80% of the available memory, 40% on the host device, divided by the ranks of "
           "the machine, see [device and memory](memory.md#device-and-memory)",
           "size, `\"auto\"`"})};
}

Section trained_keys(BallastSection& b) {
  return {
      row(kResultsAndPlan,
          also_called(train_key(b), {"trainable", "trained", "unfrozen_parameters"}),
          {"tensors that are trained: `\"all\"`, `\"adapters\"`, or patterns of Hugging Face "
           "tensor names. All others are [frozen](fine-tuning.md#frozen-tensors)",
           "`\"all\"`", "`\"all\"`, `\"adapters\"`, list of patterns"}),
      row(kResultsAndPlan, also_called(adapters_key(b), {"lora", "peft", "peft_config", "adapter"}),
          {"the adapters of `ballast.train: \"adapters\"`, see "
           "[adapters](fine-tuning.md#adapters); an error with "
           "other values of `ballast.train`",
           "`null`", "section"}),
      row(kResultsOnly, also_called(weight_decay_exclude_key(b), {"no_decay", "no_weight_decay"}),
          {"tensors without weight decay, see [weight decay](fine-tuning.md#weight-decay)",
           "`\"none\"`", "`\"none\"`, `\"transformers\"`, list of patterns"}),
      row(kResultsOnly, also_called(preference_key(b.preference), {"dpo", "dpo_config"}),
          {"the loss of `data.pairs`. The keys are those of TRL's DPOConfig. The reference model "
           "is the model without adapters, see [adapters](fine-tuning.md#adapters)",
           "", "section"}),
      row(kResultsAndPlan,
          also_called(choice("quantized_base", b.quantized_base),
                      {"quantization", "quantization_config", "bnb_4bit_quant_type"}),
          {"format of the frozen matrices of layers: `\"none\"`, `\"int8\"` or `\"nf4\"`, see "
           "[quantised base](fine-tuning.md#quantised-base)",
           "`\"auto\"`: `\"nf4\"` for folders in NF4",
           "`\"auto\"`, `\"none\"`, `\"int8\"`, `\"nf4\"`"}),
      row(kResultsAndPlan,
          also_called(flag("double_quantization", b.double_quantization),
                      {"bnb_4bit_use_double_quant"}),
          {"quantise the scales of `\"nf4\"`, too: 4.13 instead of 4.5 bits per element, see "
           "[quantised base](fine-tuning.md#quantised-base)",
           "false", "true, false"})};
}

Section order_keys(BallastSection& b) {
  return {
      row(kPlanOnly, choice("order", b.order),
          {"order of the passes: `layer_major` runs all micro-batches of a block before the next "
           "block, `micro_batch_major` all blocks of a micro-batch before the next micro-batch, "
           "`micro_batch_major_offload` the same with gradient sums in host memory, see "
           "[order and updates](memory.md#order-and-updates). Same bits",
           "`\"auto\"`",
           "`layer_major`, `micro_batch_major`, `micro_batch_major_offload`, `\"auto\"`"}),
      row(kPlanOnly, choice("update", b.update),
          {"`gated`: updates wait for the gradient's norm and run during the next forward pass. "
           "`eager`: they run inside the backward pass, see [order and "
           "updates](memory.md#order-and-updates)",
           "`gated`", "`gated`, `eager`"}),
      row(kPlanOnly, whole_or("speculative_updates", b.speculative_updates, "auto", {0, 1U << 17U}),
          {"number of blocks that are updated before the norm is known, and restored if the step "
           "is clipped or skipped, see [order and updates](memory.md#order-and-updates). Same bits",
           "`auto`", "0 (off) to 131072; `auto`"}),
      row(kResultsAndPlan, choice("expert_updates", b.expert_updates),
          {"`all` updates every expert, `active` only those with tokens in the step, see "
           "[mixtures of experts](memory.md#mixtures-of-experts)",
           "`all`", "`all`, `active` (formerly `touched`)"}),
      row(kResultsAndPlan, choice("router_losses", b.router_losses),
          {"rows over which the router losses are computed: `step`, all micro-batches and ranks as "
           "one batch, or `micro_batch`, each of them, see [router "
           "losses](memory.md#router-losses)",
           "`step`", "`step`, `micro_batch`"}),
      row(kPlanOnly, flag_or_auto("expert_prefetch", b.expert_prefetch),
          {"prefetch the weights of recently used experts before the router has chosen, see "
           "[mixtures of experts](memory.md#mixtures-of-experts). Same bits",
           "`auto`", "true, false, `auto`"}),
      row(kPlanOnly,
          also_called(or_auto(whole("expert_parallel", b.expert_parallel, {1, 1U << 16U}),
                              b.expert_parallel),
                      {"ep_size", "expert_parallel_size", "expert_model_parallel_size"}),
          {"number of ranks that share the experts of a layer, see [mixtures of "
           "experts](memory.md#mixtures-of-experts)",
           "`auto`", "1, the number of ranks, `auto`"})};
}

Section debug_keys(BallastSection& b) {
  return {
      row(kNeither, flag("serial", b.serial),
          {"one operation at a time, for debugging; same bits", "false", "true, false"}),
      row(kNeither, flag("nvtx", b.nvtx),
          {"mark every operation as a named range for NVIDIA's profilers, on the thread that "
           "starts it (`nsys profile --trace=cuda,nvtx`). Needs a build with CUDA's NVTX headers. "
           "Same bits",
           "false", "true, false"}),
      row(kNeither, whole_or("delay_seed", b.delay_seed, {}, kAnyNumber),
          {"delay every operation by a random time (below 0.3 ms) drawn with this seed, to find "
           "races; same bits",
           "null", "0 to 2^64 - 1, null"})};
}

Section memory_keys(BallastSection& b, step::BufferCounts& buffers) {
  return {
      row(kPlanOnly, tier_key(rule_tier("activations", b.activations), b.activations),
          {"tier of the blocks' inputs until the backward pass, see "
           "[activations and gradients](memory.md#activations-and-gradients). Same bits",
           "`\"auto\"`", "`device`, `host` (or `cpu`), `nvme`, `\"auto\"`"}),
      row(kPlanOnly, tier_key(rule_tier("gradients", b.gradients, kBelowDevice), b.gradients),
          {"tier of the packed gradients of blocks that are updated on the host, until their "
           "update, see [activations and gradients](memory.md#activations-and-gradients)",
           "`\"auto\"`", "`host` (or `cpu`), `nvme`, `\"auto\"`"}),
      row(kPlanOnly,
          also_called(recompute_key(b.kept, "auto"),
                      {"gradient_checkpointing", "checkpoint_activations"}),
          {"true: the backward pass recomputes the intermediates of layers. false: they are kept "
           "on the device. `\"except_attention\"`: the results of attention are kept. See "
           "[activations and gradients](memory.md#activations-and-gradients). Same bits",
           "`\"auto\"`", "true, false, `\"except_attention\"`, `\"auto\"`"}),
      row(kPlanOnly, buffers_key("ballast.device_weight_buffers", buffers),
          {"device buffers for weights in transit; with 1, nothing is uploaded during computation; "
           "0: chosen automatically",
           "0", "0 to 1024"}),
      row(kPlanOnly, buffers_key("ballast.device_gradient_buffers", buffers),
          {"device buffers for gradients in transit; 0: chosen automatically", "0", "0 to 1024"}),
      row(kPlanOnly, buffers_key("ballast.activation_buffers", buffers),
          {"host staging buffers for activations on NVMe; 0: chosen automatically", "0",
           "0 to 1024"}),
      row(kPlanOnly, buffers_key("ballast.gradient_buffers", buffers),
          {"host staging buffers for gradients on NVMe; 0: chosen automatically", "0",
           "0 to 1024"})};
}

Section update_keys(BallastSection& b) {
  return {
      row(kPlanOnly,
          or_auto(whole("compute_threads", b.compute_threads, kThreads), b.compute_threads),
          {"threads of the host device per rank. With AVX-512, every number gives the same bits. "
           "Without it, or with AMX, the last bits differ, and a resume with another number says "
           "so",
           "`auto`: all CPUs, divided by the ranks that run on them",
           "0 (like `\"auto\"`) to 4096, `\"auto\"`"}),
      row(kPlanOnly, or_auto(whole("update_threads", b.update_threads, kThreads), b.update_threads),
          {"threads of the CPU update per rank",
           "`auto`: all CPUs, divided by the ranks that run on them",
           "0 (like `\"auto\"`) to 4096, `\"auto\"`"}),
      row(kPlanOnly, choice("update_isa", b.update_isa),
          {"instruction set of the CPU update; same bits for each", "`auto`: the widest",
           "`auto`, `scalar`, `neon`, `avx2`, `avx512`"}),
      row(kPlanOnly, numa_node_key(b.update_numa_node),
          {"NUMA node whose CPUs run the CPU update; same bits for each",
           "`auto`: any; ranks that are not bound to CPUs are spread over the nodes",
           "0 to 1023, `\"auto\"`"}),
      row(kResultsAndPlan, choice("optimizer_states", b.optimizer_states),
          {"format of the moments: `fp32`; `bf16_first`: the first moment in bf16; `8bit`: all in "
           "8 bits, see [bytes of optimizer states](memory.md#bytes-of-optimizer-states)",
           "`fp32`", "`fp32`, `bf16_first`, `8bit`"}),
      row(kPlanOnly, real("link_gbps", b.link_gbps, kNotNegative),
          {"limit for copies between host and device on the host device, GB/s (10^9 bytes); 0: no "
           "limit",
           "0", "at least 0"}),
      row(kPlanOnly, placement_key(b.placement),
          {"rules for single blocks; later ones win, see [placement "
           "rules](memory.md#placement-rules)",
           "[]", "list"})};
}

Section run_keys(BallastSection& b) {
  return {
      row(kNeither, also_called(whole("steps", b.steps, kSteps), {"max_steps", "train_steps"}),
          {"steps to train; 0: `--steps` is required", "0", "at least 0"}),
      row(kResultsOnly, whole("seed", b.seed, kAnyNumber),
          {"seed of initial weights and of the order of the data", "1234", "0 to 2^64 - 1"}),
      row(kNeither, whole("eval_every", b.eval_every, kSteps),
          {"steps between evaluations; 0: only at the end", "0", "at least 0"}),
      row(kPlanOnly, whole("eval_batches", b.eval_batches, {1, kSteps.high}),
          {"micro-batches of an evaluation, all ranks together. The loss is the mean over exactly "
           "their targets, for any accumulation and number of ranks; a rest is filled with padding",
           "8", "at least 1"}),
      row(kNeither,
          also_called(real("stop_at_loss", b.stop_at_loss, kNotNegative),
                      {"target_loss", "loss_threshold"}),
          {"end the run as after its last step, with its checkpoint and weights, when an "
           "evaluation (`ballast.eval_every`) finds a loss below this; 0: never. A run that "
           "continues from that checkpoint trains until another evaluation does",
           "0", "at least 0"})};
}

Section end_keys(BallastSection& b) {
  return {
      row(kNeither,
          also_called(flag("save_weights", b.save_weights), {"save_model", "save_checkpoint"}),
          {"at the end of the run, write the weights to `weights/` in the run directory, see "
           "[saved weights](fine-tuning.md#saved-weights)",
           "true", "true, false"}),
      row(kNeither, also_called(checkpoint_every_key(b), {"save_every", "save_steps"}),
          {"steps or time between checkpoints, see [checkpoints and "
           "resume](checkpoints.md#checkpoints-and-resume); 0: none",
           "0", "at least 0, `\"500 steps\"`, `\"90s\"`, `\"30m\"`, `\"2h\"`, `\"1d\"`"}),
      row(kNeither,
          also_called(whole("checkpoint_keep", b.checkpoint_keep, {1, 1024}), {"save_total_limit"}),
          {"number of checkpoints that are kept, see [disk space of "
           "checkpoints](checkpoints.md#disk-space-of-checkpoints)",
           "2", "1 to 1024"}),
      row(kNeither, whole("max_skipped_steps", b.max_skipped_steps, {1, kSteps.high}),
          {"the run stops after this many steps in a row with gradients that are not finite. "
           "Without effect with a dynamic loss scale, see `fp16.min_loss_scale`",
           "10", "at least 1"}),
      row(kResultsOnly, also_called(spike_key(b.spike), {"loss_spike", "on_spike"}),
          {"reaction to a loss spike: an action, or an object with the keys below, see "
           "[spikes and errors](checkpoints.md#spikes-and-errors)",
           "`\"off\"`", "`\"off\"`, `\"warn\"`, `\"stop\"`, `\"rollback\"`"}),
      row(kNeither, choice("on_error", b.on_error),
          {"reaction to a failed swap space: `stop`, or `resume` from the latest checkpoint, see "
           "[spikes and errors](checkpoints.md#spikes-and-errors)",
           "`stop`", "`stop`, `resume`"}),
      row(kNeither, real("comm_timeout_seconds", b.comm_timeout_seconds, kSeconds),
          {"how long a rank waits for the others before the run fails", "300",
           "above 0, at most 10^6"}),
      row(kNeither, also_called(path("out", b.out), {"output", "out_dir", "output_dir"}),
          {"run directory, see [files of a run](reading-a-run.md#files-of-a-run)",
           "a new folder in `$XDG_STATE_HOME/ballast`, named after config and time", "path"})};
}

}  // namespace

Key buffers_key(std::string_view path, step::BufferCounts& buffers) {
  const auto* const kind =
      std::find_if(step::kBufferKinds.begin(), step::kBufferKinds.end(),
                   [path](const step::BufferKind& one) { return one.key == path; });
  expects(kind != step::kBufferKinds.end(), "a number of buffers must be in the table");
  return whole(std::string(path.substr(path.rfind('.') + 1)), buffers.*(kind->count),
               {0, step::BufferKind::kMax});
}

Section ballast_keys(BallastSection& b, step::BufferCounts& buffers) {
  return joined({machine_keys(b), trained_keys(b), order_keys(b), debug_keys(b),
                 memory_keys(b, buffers), update_keys(b), run_keys(b), end_keys(b)});
}

}  // namespace ballast::config
