#include "tests/plans/small_runs.h"

#include <algorithm>
#include <bitset>
#include <map>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ballast/config/config.h"
#include "ballast/core/random.h"
#include "ballast/model/compute.h"
#include "ballast/setup/translate.h"

namespace ballast::plans {
namespace {

constexpr std::size_t kRuns = 80;

struct FeatureChoices {
  const char* name;
  std::vector<std::string> choices;
};

/// Choices in the order of Feature.
const std::array<FeatureChoices, kFeatures>& table() {
  static const std::array<FeatureChoices, kFeatures> kTable = {
      {{"family",
        {"gpt2", "llama", "qwen2", "gemma3", "gpt_neox", "mixtral", "qwen2_moe", "gpt_oss"}},
       {"size", {"small", "wide"}},
       {"layers", {"1", "2", "4"}},
       {"layer_tiles", {"1", "3"}},
       {"vocabulary_tiles", {"1", "3"}},
       {"tied", {"no", "yes"}},
       // "outer": embedding and head, "parts": some tensors of each block, "positions": one tile of
       // the embedding, "codes": LoRA over NF4.
       {"trained", {"all", "last", "outer", "parts", "positions", "lora", "dora", "codes"}},
       {"pairs", {"no", "yes"}},
       {"ranks", {"1", "2", "4"}},
       {"stage", {"0", "1", "2", "3"}},
       {"gathers", {"plain", "hpz", "qwz", "hpz+qwz"}},
       {"persistence", {"0", "5000", "10000000"}},
       {"expert_parallel", {"no", "yes"}},
       {"expert_updates", {"all", "active"}},
       {"expert_prefetch", {"no", "yes"}},
       {"order", {"layer_major", "micro_batch_major"}},
       {"update", {"gated", "eager"}},
       {"type", {"bf16", "fp16", "fp32"}},
       {"states", {"adamw", "adamw-8bit", "lion-bf16", "sgd"}},
       {"micro_batches", {"1", "2", "3"}},
       {"evaluation", {"1", "2"}},
       {"data", {"tokens", "packed"}},
       {"sub_groups", {"one", "several"}},
       {"checkpoints", {"0", "1", "2"}},
       {"buffers", {"1", "2", "3", "mixed"}},
       {"purpose", {"training", "evaluation"}}}};
  return kTable;
}

/// Random numbers, the same on every machine.
class Draws {
 public:
  explicit Draws(std::uint64_t seed) : seed_(seed) {}
  std::size_t below(std::size_t n) { return random_u64(seed_, drawn_++) % n; }
  bool chance(std::size_t percent) { return below(100) < percent; }

 private:
  std::uint64_t seed_;
  std::uint64_t drawn_ = 0;
};

std::uint8_t& at(RunChoices& choices, Feature feature) {
  return choices[static_cast<std::size_t>(feature)];
}

const std::string& name_in(const RunChoices& choices, Feature feature) {
  const auto index = static_cast<std::size_t>(feature);
  return table()[index].choices[choices[index]];
}

bool has_experts(const std::string& family) {
  return family == "mixtral" || family == "qwen2_moe" || family == "gpt_oss";
}

/// Takes the first choice where configs or models exclude the drawn one.
void settle(RunChoices& choices) {
  const auto is = [&](Feature feature, const char* name) {
    return name_in(choices, feature) == name;
  };
  const auto require = [&](Feature feature, bool allowed) {
    if (!allowed) at(choices, feature) = 0;
  };
  const bool experts = has_experts(name_in(choices, Feature::family));
  const bool adapters =
      is(Feature::trained, "lora") || is(Feature::trained, "dora") || is(Feature::trained, "codes");
  const bool several = !is(Feature::ranks, "1");
  require(Feature::layer_tiles,
          !adapters && (is(Feature::family, "llama") || is(Feature::family, "qwen2")));
  if (is(Feature::trained, "positions")) require(Feature::trained, is(Feature::family, "gpt2"));
  require(Feature::pairs, adapters && !experts);
  require(Feature::data, !is(Feature::pairs, "yes"));
  require(Feature::stage, several);
  if (!is(Feature::ranks, "4") && is(Feature::gathers, "hpz")) require(Feature::gathers, false);
  if (!is(Feature::ranks, "4") && is(Feature::gathers, "hpz+qwz")) {
    require(Feature::gathers, false);
  }
  require(Feature::gathers, is(Feature::stage, "3"));
  require(Feature::persistence, is(Feature::stage, "3"));
  require(Feature::expert_parallel, several && experts && !is(Feature::trained, "codes"));
  require(Feature::expert_updates, experts);
  require(Feature::expert_prefetch, experts);
  require(Feature::evaluation, !is(Feature::micro_batches, "1"));
  // An evaluation has one rank with all experts, and trains nothing.
  if (is(Feature::purpose, "evaluation")) {
    for (const Feature feature : {Feature::update, Feature::states, Feature::checkpoints,
                                  Feature::sub_groups, Feature::expert_parallel}) {
      require(feature, false);
    }
  }
}

RunChoices draw(Draws& draws) {
  RunChoices choices{};
  for (std::size_t f = 0; f < kFeatures; ++f) {
    choices[f] = static_cast<std::uint8_t>(draws.below(table()[f].choices.size()));
  }
  // Plans of an evaluation alone are short.
  if (draws.chance(60)) at(choices, Feature::purpose) = 0;
  settle(choices);
  return choices;
}

/// A pair of choices, as a number.
std::size_t pair_of(const RunChoices& choices, std::size_t first, std::size_t second) {
  constexpr std::size_t kMax = 8;
  return ((first * kMax + choices[first]) * kFeatures + second) * kMax + choices[second];
}
constexpr std::size_t kPairs = kFeatures * 8 * kFeatures * 8;
using PairSet = std::bitset<kPairs>;

template <class Use>
void for_pairs(const RunChoices& choices, Use use) {
  for (std::size_t first = 0; first < kFeatures; ++first) {
    for (std::size_t second = first + 1; second < kFeatures; ++second) {
      use(pair_of(choices, first, second));
    }
  }
}

std::size_t count_new(const RunChoices& choices, const PairSet& covered) {
  std::size_t count = 0;
  for_pairs(choices, [&](std::size_t pair) { count += covered[pair] ? 0 : 1; });
  return count;
}

/// Returns the best of some random choices, improved feature by feature. Few choices contain the
/// last pairs that are not covered.
RunChoices draw_best(Draws& draws, const PairSet& covered) {
  constexpr int kDrawn = 300;
  constexpr int kMax = 5000;
  RunChoices best = draw(draws);
  for (int i = 1; i < kDrawn || (i < kMax && count_new(best, covered) == 0); ++i) {
    const RunChoices next = draw(draws);
    if (count_new(next, covered) > count_new(best, covered)) best = next;
  }
  for (int round = 0; round < 2; ++round) {
    for (std::size_t f = 0; f < kFeatures; ++f) {
      for (std::size_t choice = 0; choice < table()[f].choices.size(); ++choice) {
        RunChoices next = best;
        next[f] = static_cast<std::uint8_t>(choice);
        settle(next);
        if (count_new(next, covered) > count_new(best, covered)) best = next;
      }
    }
  }
  return best;
}

/// Combinations of more than two choices that have operations or buffers which no pair has.
std::vector<RunChoices> further_choices() {
  using enum Feature;
  struct Chosen {
    Feature feature;
    const char* name;
  };
  const std::vector<Chosen> tied_tiles = {
      {family, "llama"}, {layers, "2"},        {layer_tiles, "3"}, {vocabulary_tiles, "3"},
      {tied, "yes"},     {micro_batches, "3"}, {evaluation, "2"}};
  std::vector<RunChoices> all;
  for (const char* const what : {"training", "evaluation"}) {
    RunChoices choices{};
    std::vector<Chosen> chosen = tied_tiles;
    chosen.push_back({purpose, what});
    for (const Chosen& one : chosen) {
      const auto& names = choices_of(one.feature);
      at(choices, one.feature) = static_cast<std::uint8_t>(
          std::find(names.begin(), names.end(), one.name) - names.begin());
    }
    all.push_back(choices);
  }
  return all;
}

std::vector<SmallRun> draw_runs() {
  Draws draws(44);
  PairSet covered;
  std::vector<SmallRun> runs;
  const auto add = [&](const RunChoices& choices) {
    for_pairs(choices, [&](std::size_t pair) { covered.set(pair); });
    runs.push_back({fmt::format("{:02}", runs.size()), choices});
  };
  for (const RunChoices& choices : further_choices()) add(choices);
  while (runs.size() < kRuns) add(draw_best(draws, covered));
  return runs;
}

/// Patterns of tensor names for `trained`.
std::string train_patterns(const std::string& family, const std::string& trained,
                           std::uint64_t layers, bool tied) {
  const bool gpt2 = family == "gpt2";
  const bool neox = family == "gpt_neox";
  if (trained == "outer") {
    if (gpt2) return tied ? R"(["*wte*"])" : R"(["*wte*", "lm_head*"])";
    if (neox) return tied ? R"(["*embed_in*"])" : R"(["*embed_in*", "embed_out*"])";
    return tied ? R"(["*embed_tokens*"])" : R"(["*embed_tokens*", "lm_head*"])";
  }
  if (trained == "positions") return R"(["*wpe*"])";
  if (trained == "parts") return gpt2 || neox ? R"(["*bias"])" : R"(["*norm*"])";
  const std::string layer = gpt2 ? "*h.{}.*" : neox ? "*gpt_neox.layers.{}.*" : "model.layers.{}.*";
  const std::string norm = gpt2 ? "*ln_f*" : neox ? "*final_layer_norm*" : "model.norm.weight";
  return fmt::format(R"(["{}", "{}"])", fmt::format(fmt::runtime(layer), layers - 1), norm);
}

std::string model_section(const SmallRun& c) {
  const std::string& family = c.choice(Feature::family);
  const bool wide = c.choice(Feature::size) == "wide";
  const int width = wide ? 256 : 64;
  std::string text = fmt::format(
      R"("family": "{}", "vocab_size": {}, "hidden_size": {}, "num_layers": {}, "num_heads": 4,
         "vocabulary_tiles": {}, "tie_embeddings": {})",
      family, wide ? 1000 : 131, width, c.choice(Feature::layers),
      c.choice(Feature::vocabulary_tiles), c.choice(Feature::tied) == "yes");
  if (family != "gpt2" && family != "gpt_neox") text += R"(, "num_kv_heads": 2)";
  if (c.choice(Feature::layer_tiles) != "1") {
    text += fmt::format(R"(, "layer_tiles": {})", c.choice(Feature::layer_tiles));
  }
  // Such positions depend on the length of each sequence of a pair.
  if (family == "llama" && c.choice(Feature::pairs) == "yes") {
    text +=
        R"(, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16})";
  }
  if (!has_experts(family)) return text;
  text += fmt::format(R"(, "{}": 4, "num_experts_per_tok": 2, "intermediate_size": {},
                      "output_router_logits": true, "router_aux_loss_coef": 0.1)",
                      family == "qwen2_moe" ? "num_experts" : "num_local_experts", width);
  if (family == "qwen2_moe") {
    text += fmt::format(R"(, "moe_intermediate_size": {0}, "shared_expert_intermediate_size": {0})",
                        width / 2);
    if (c.choice(Feature::layers) == "4") text += R"(, "mlp_only_layers": [1])";
  }
  return text;
}

std::string optimizer_section(const SmallRun& c) {
  const std::string& states = c.choice(Feature::states);
  if (states == "sgd") return R"({"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}})";
  if (states == "lion-bf16") return R"({"type": "Lion", "params": {"lr": 0.001}})";
  return R"({"type": "AdamW", "params": {"lr": 0.01}})";
}

std::string zero_section(const SmallRun& c) {
  std::string text = fmt::format(R"("stage": {}, "stage3_param_persistence_threshold": {})",
                                 c.choice(Feature::stage), c.choice(Feature::persistence));
  const std::string& gathers = c.choice(Feature::gathers);
  if (gathers.starts_with("hpz")) text += R"(, "zero_hpz_partition_size": 2)";
  if (gathers.ends_with("qwz")) text += R"(, "zero_quantized_weights": true)";
  if (c.choice(Feature::sub_groups) == "several") {
    text += fmt::format(R"(, "sub_group_size": {})",
                        c.choice(Feature::size) == "wide" ? 131072 : 12288);
  }
  return text;
}

/// Numbers of buffers of the six kinds.
std::array<int, 6> buffer_counts(const SmallRun& c) {
  const std::string& buffers = c.choice(Feature::buffers);
  if (buffers == "mixed") return {1, 2, 3, 2, 1, 2};
  const int count = std::stoi(buffers);
  return {count, count, count, count, count, count};
}

std::string ballast_section(const SmallRun& c, std::uint64_t ranks) {
  const std::string& trained = c.choice(Feature::trained);
  const std::string& states = c.choice(Feature::states);
  const auto buffers = buffer_counts(c);
  std::string text = fmt::format(
      R"("device": "host", "compute_threads": 1, "order": "{}", "update": "{}",
         "eval_batches": {}, "optimizer_states": "{}", "device_weight_buffers": {},
         "device_gradient_buffers": {}, "activation_buffers": {}, "gradient_buffers": {})",
      c.choice(Feature::order), c.choice(Feature::update),
      std::stoul(c.choice(Feature::evaluation)) * ranks,
      states == "adamw-8bit" ? "8bit" : (states == "lion-bf16" ? "bf16_first" : "fp32"), buffers[0],
      buffers[1], buffers[2], buffers[3]);
  if (c.choice(Feature::checkpoints) != "0") {
    text += fmt::format(R"(, "checkpoint_every": 1, "checkpoint_keep": {})",
                        c.choice(Feature::checkpoints));
  }
  if (c.choice(Feature::expert_parallel) == "yes") {
    text += fmt::format(R"(, "expert_parallel": {})", ranks);
  }
  if (has_experts(c.choice(Feature::family))) {
    text +=
        fmt::format(R"(, "expert_updates": "{}", "expert_prefetch": {}, "router_losses": "{}")",
                    c.choice(Feature::expert_updates), c.choice(Feature::expert_prefetch) == "yes",
                    c.choice(Feature::order) == "layer_major" ? "step" : "micro_batch");
  }
  if (trained == "all") return text;
  if (trained == "lora" || trained == "dora" || trained == "codes") {
    text += fmt::format(
        R"(, "train": "adapters", "adapters": {{"targets": "all-linear", "rank": 4, "dora": {}}})",
        trained == "dora");
    if (trained == "codes") text += R"(, "quantized_base": "nf4")";
    return text;
  }
  return text +
         fmt::format(R"(, "train": {})", train_patterns(c.choice(Feature::family), trained,
                                                        std::stoul(c.choice(Feature::layers)),
                                                        c.choice(Feature::tied) == "yes"));
}

config::Config config_of(const SmallRun& c) {
  const auto ranks = static_cast<std::uint32_t>(std::stoul(c.choice(Feature::ranks)));
  const auto buffers = buffer_counts(c);
  const std::string& type = c.choice(Feature::type);
  const char* const data = c.choice(Feature::pairs) == "yes"     ? "pairs"
                           : c.choice(Feature::data) == "packed" ? "documents"
                                                                 : "tokens";
  const std::string text = fmt::format(
      R"({{"model": {{{}}}, "data": {{"{}": ["unused"], "sequence_length": 32}},
          "optimizer": {}, "bf16": {{"enabled": {}}},
          "fp16": {{"enabled": {}, "loss_scale": 128}},
          "gradient_clipping": {}, "train_micro_batch_size_per_gpu": 2,
          "gradient_accumulation_steps": {},
          "zero_optimization": {{{}, "offload_optimizer": {{"device": "cpu", "buffer_count": {}}},
                                 "offload_param": {{"device": "cpu", "buffer_count": {}}}}},
          "aio": {{"any_file_system": true}}, "ballast": {{{}}}}})",
      model_section(c), data, optimizer_section(c), type == "bf16", type == "fp16",
      c.choice(Feature::update) == "eager" ? 0 : 1, c.choice(Feature::micro_batches),
      zero_section(c), buffers[4], buffers[5], ballast_section(c, ranks));
  return config::parse(text, "/", "run " + c.name, {}, ranks);
}

/// Styles of the placements of a run. The first draws every tier separately.
enum class PlacementStyle : std::uint8_t {
  scattered,
  outer_on_device,  ///< embedding and head, so that the head may be trained in one pass
  swapped,          ///< most data on NVMe, most blocks speculate
  in_memory         ///< nothing on NVMe
};

step::BlockPlacement draw_block(Draws& draws, PlacementStyle style) {
  const auto tier = [&] {
    if (style == PlacementStyle::swapped && draws.chance(60)) return Tier::nvme;
    return kTiers[draws.below(style == PlacementStyle::in_memory ? 2 : 3)];
  };
  step::BlockPlacement block;
  block.weights = tier();
  block.optimizer = tier();
  block.activations = tier();
  const bool swaps = draws.chance(50) && style != PlacementStyle::in_memory;
  block.gradients = swaps ? Tier::nvme : Tier::host;
  block.kept = draws.chance(50) ? step::Kept::all : step::Kept::nothing;
  block.speculates = draws.chance(style == PlacementStyle::swapped ? 80 : 30);
  return block;
}

step::Placement draw_placement(const engine::Blueprint& blueprint, const std::string& name,
                               std::uint64_t seed) {
  Draws draws(fnv1a(name) + seed);
  const auto style = static_cast<PlacementStyle>(seed % kPlacements);
  const bool trains = blueprint.options.purpose == step::Purpose::training;
  step::Placement placement;
  for (std::size_t b = 0; b < blueprint.problem.blocks.size(); ++b) {
    step::BlockPlacement block = draw_block(draws, style);
    const bool outer = !blueprint.problem.program().is_layer(static_cast<model::BlockId>(b));
    if (style == PlacementStyle::outer_on_device && outer) {
      block.weights = Tier::device;
      block.kept = step::Kept::all;
    }
    if (blueprint.options.update == step::Update::eager || block.optimizer == Tier::device) {
      block.speculates = false;
    }
    if (!trains) block = {.weights = block.weights};
    placement.blocks.push_back(block);
  }
  return placement;
}

}  // namespace

model::KernelSizes kernel_sizes(const model::Architecture& model, DType type,
                                model::MicroBatchShape shape) {
  model::KernelSizes sizes = model::kernel_memory(model, type, shape, "host", 1);
  sizes.workspace = shape.tokens() * 4096;
  return sizes;
}

const std::string& SmallRun::choice(Feature feature) const {
  return name_in(choices, feature);
}

std::string SmallRun::describe() const {
  std::vector<std::string> parts;
  for (std::size_t f = 0; f < kFeatures; ++f) {
    parts.push_back(fmt::format("{}={}", table()[f].name, choice(static_cast<Feature>(f))));
  }
  return fmt::format("{}", fmt::join(parts, " "));
}

const std::vector<std::string>& choices_of(Feature feature) {
  return table()[static_cast<std::size_t>(feature)].choices;
}

const std::vector<SmallRun>& small_runs() {
  static const std::vector<SmallRun> kAll = draw_runs();
  return kAll;
}

std::vector<std::string> uncovered_pairs() {
  constexpr int kDrawn = 20'000;
  PairSet covered;
  for (const SmallRun& c : small_runs()) {
    for_pairs(c.choices, [&](std::size_t pair) { covered.set(pair); });
  }
  Draws draws(45);
  std::set<std::string> missing;
  for (int i = 0; i < kDrawn; ++i) {
    const RunChoices drawn = draw(draws);
    if (count_new(drawn, covered) == 0) continue;
    for (std::size_t first = 0; first < kFeatures; ++first) {
      for (std::size_t second = first + 1; second < kFeatures; ++second) {
        if (covered[pair_of(drawn, first, second)]) continue;
        missing.insert(fmt::format(
            "{}={} {}={}", table()[first].name, name_in(drawn, static_cast<Feature>(first)),
            table()[second].name, name_in(drawn, static_cast<Feature>(second))));
      }
    }
  }
  return {missing.begin(), missing.end()};
}

engine::Blueprint outline_of(const SmallRun& run, std::uint64_t seed) {
  const config::Config config = config_of(run);
  const engine::RunInputs inputs = setup::translate(config);
  const model::MicroBatchShape shape = {config.micro_sequences(), config.data.sequence_length};
  const auto world = static_cast<std::uint32_t>(std::stoul(run.choice(Feature::ranks)));
  constexpr memory::Budgets kRoomy = {.device = 64 * kGiB, .host = 64 * kGiB};
  engine::Blueprint blueprint = engine::outline(
      inputs, kRoomy, kernel_sizes(inputs.model, inputs.type, shape), {.data = world});
  if (run.choice(Feature::purpose) == "evaluation") {
    blueprint.options.purpose = step::Purpose::evaluation;
  }
  blueprint.placement = draw_placement(blueprint, run.name, seed);
  return blueprint;
}

std::optional<engine::Blueprint> outline_with_attention(const SmallRun& run, std::uint64_t seed) {
  engine::Blueprint blueprint = outline_of(run, seed);
  if (blueprint.options.purpose == step::Purpose::evaluation) return std::nullopt;
  bool any = false;
  for (std::size_t b = 0; b < blueprint.placement.blocks.size(); ++b) {
    if (!blueprint.problem.index->keeps_attention(b)) continue;
    blueprint.placement.blocks[b].kept = step::Kept::attention;
    any = true;
  }
  return any ? std::optional(std::move(blueprint)) : std::nullopt;
}

}  // namespace ballast::plans
