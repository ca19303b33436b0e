#include <algorithm>
#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ballast/model/family.h"

#include "src/config/config_tree.h"
#include "src/config/key_table.h"
#include "src/model/description/layer_rules.h"

namespace ballast::config {

// The ranks of a run by what they share: sequence_parallel_size, tensor_parallel and the batch
// triple.

namespace {

constexpr std::string_view kSequence = "sequence_parallel_size";
constexpr std::string_view kTensor = "tensor_parallel.autotp_size";

std::string count_of(std::uint64_t number, std::string_view what) {
  return fmt::format("{} {}{}", number, what, number == 1 ? "" : "s");
}

std::string divisors_of(std::uint64_t number) {
  std::vector<std::uint64_t> divisors = {1};
  for (std::uint64_t i = 2; i <= number; ++i) {
    if (number % i == 0) divisors.push_back(i);
  }
  return fmt::format("{}", fmt::join(divisors, ", "));
}

/// Describes the data places of a run for messages: "4 ranks", or "2 groups of 4 ranks (KEYS)".
std::string describe_places(const Config& c, std::uint64_t places) {
  const std::uint64_t each = c.ranks_per_batch_part();
  if (each == 1) return count_of(places, "rank");
  std::vector<std::string_view> keys;
  if (c.sequence_parallel > 1) keys.push_back(kSequence);
  if (c.tensor_parallel > 1) keys.push_back(kTensor);
  return fmt::format("{} of {} ranks ({})", count_of(places, "group"), each,
                     fmt::join(keys, " x "));
}

}  // namespace

Section tensor_parallel_keys(std::uint64_t& size, std::vector<std::string>& log) {
  return with_deepspeed_keys(
      {row(kPlanOnly,
           also_called(whole("autotp_size", size, {0, 1U << 16U}),
                       {"tp_size", "tensor_parallel_size", "tensor_model_parallel_size",
                        "model_parallel_size", "tensor_parallel_degree", "tp_degree"}),
           {"number of ranks that share the tiles of each layer (Megatron), see "
            "[tensor parallelism](many-cards.md#tensor-parallelism)",
            "1 (or 0): each rank computes whole layers",
            "a divisor of the ranks, of the heads of keys, of `model.layer_tiles` and "
            "`model.vocabulary_tiles`"})},
      "tensor_parallel", log);
}

void complete_batch(Config& config, const Document& document, std::uint64_t places) {
  BatchSection& b = config.batch;
  const std::string ranks = describe_places(config, places);
  const auto divide = [&](std::uint64_t count, std::string_view key) {
    const std::uint64_t share = b.train_batch / places / count;
    if (share == 0 || share * count * places != b.train_batch) {
      document.fail("train_batch_size", fmt::format("{} is not divisible by {} {} x {}",
                                                    b.train_batch, key, count, ranks));
    }
    return share;
  };
  constexpr std::string_view kMicro = "train_micro_batch_size_per_gpu";
  constexpr std::string_view kAccumulation = "gradient_accumulation_steps";
  if (b.train_batch == 0 && b.micro_batch == 0 && b.automatic) {
    constexpr std::uint64_t kSequences = 8;
    (b.accumulation == 0 ? b.train_batch : b.micro_batch) =
        b.accumulation == 0 ? kSequences * places : kSequences;
    config.notes.push_back(
        fmt::format("{}: \"auto\" is {} sequences, the default of transformers; a step "
                    "has this number on each rank{}",
                    kMicro, kSequences, b.accumulation == 0 ? "" : " and accumulation step"));
  }
  if (b.train_batch == 0 && b.micro_batch == 0) {
    document.fail("train_batch_size", fmt::format("missing; give it, {} or both", kMicro));
  }
  // Derives the third value from train_batch and one of the other two.
  b.automatic = b.automatic && b.micro_batch == 0 && b.accumulation == 0;
  if (b.accumulation == 0) {
    b.accumulation = b.train_batch == 0 || b.micro_batch == 0 ? 1 : divide(b.micro_batch, kMicro);
  }
  if (b.micro_batch == 0) b.micro_batch = divide(b.accumulation, kAccumulation);
  std::uint64_t product = 0;
  if (__builtin_mul_overflow(b.micro_batch, b.accumulation, &product) ||
      __builtin_mul_overflow(product, places, &product)) {
    document.fail(std::string(kMicro), fmt::format("{} x {} {} x {} is too large", b.micro_batch,
                                                   kAccumulation, b.accumulation, ranks));
  }
  if (b.train_batch == 0) b.train_batch = product;
  if (b.train_batch != product) {
    document.fail(
        "train_batch_size",
        fmt::format("{} is not {} {} x {} {} x {} = {}; leave one of them out", b.train_batch,
                    kMicro, b.micro_batch, kAccumulation, b.accumulation, ranks, product));
  }
}

void check_sequence_parallel(const Config& c, const Document& document, std::uint64_t ranks) {
  const std::uint64_t size = c.sequence_parallel;
  if (size == 1) return;
  const auto fail = [&](const std::string& rule) { document.fail(std::string(kSequence), rule); };
  std::uint64_t heads = 0;
  const std::vector<model::LayerSpec> layers = model::layers_of(c.model);
  for (const model::LayerSpec& layer : layers) {
    heads = std::gcd(heads, model::heads_of(layer, c.model).kv_heads);
  }
  const std::uint64_t length = c.data.sequence_length;
  const auto check = [&](std::uint64_t number, const std::string& what) {
    if (number % size == 0) return;
    fail(fmt::format(
        "{} does not divide the {}; it must divide the heads of keys ({}), "
        "data.sequence_length ({}) and the ranks; possible: {}",
        size, what, heads, length, divisors_of(std::gcd(std::gcd(heads, length), ranks))));
  };
  if (ranks > 0) check(ranks, count_of(ranks, "rank") + " of this run");
  check(heads, count_of(heads, "head") + " of keys");
  check(length, fmt::format("{} tokens of data.sequence_length", length));
  if (!c.data.pairs.empty()) {
    fail("the loss of a preference pair needs its whole sequences on one rank; set it to 1");
  }
  if (c.tensor_parallel > 1) {
    fail(
        fmt::format("sequence and tensor parallelism cannot be combined, and {} is {}; set one of "
                    "them to 1",
                    kTensor, c.tensor_parallel));
  }
  if (c.model.layer_tiles > 1) {
    fail(
        fmt::format("attention in tiles is not shared by ranks, but model.layer_tiles is {}; set "
                    "one of them to 1",
                    c.model.layer_tiles));
  }
  const bool convolves = model::any_has<model::ConvolutionSpec>(layers);
  if (convolves || model::any_has<model::DeltaSpec>(layers)) {
    fail(fmt::format("{} of this {} model need whole sequences on one rank; set it to 1",
                     convolves ? "convolutions" : "gated delta nets", c.model.family));
  }
  if (model::links_layers(layers)) {
    fail(
        fmt::format("layers of this {} model share keys and values or have embeddings, for which "
                    "ranks need whole sequences; set it to 1",
                    c.model.family));
  }
  if (model::depends_on_documents(c.model, length)) {
    fail(
        "the rope_scaling of this model depends on the length of each document, of which a rank "
        "has only a part; set it to 1, or data.sequence_length to at most the length that the "
        "model was trained for");
  }
}

void refuse_model(const Config& c, const Document& document, std::string_view key,
                  const std::string& rule) {
  const std::string path = fmt::format("model.{}", key);
  const bool tiles = key == "layer_tiles" || key == "vocabulary_tiles";
  const Json* const given = find_given(document.root(), path);
  if (!tiles || c.tensor_parallel == 1 || (given != nullptr && *given != "auto")) {
    document.fail(path, rule);
  }
  if (model::any_has<model::ExpertsSpec>(model::layers_of(c.model))) {
    document.fail(
        std::string(kTensor),
        "layers with experts are not cut into tiles; set it to 1. Ranks can share experts "
        "with ballast.expert_parallel");
  }
  document.fail(std::string(kTensor), rule);
}

void note_partitioned_activations(Config& c) {
  if (!c.partition_activations || c.tensor_parallel > 1) return;
  c.ignored.emplace_back(
      "activation_checkpointing.partition_activations: only ranks that share layers "
      "(tensor_parallel.autotp_size) have activations in common");
}

void check_cuttable(const Config& c, const Document& document) {
  if (c.tensor_parallel == 1) return;
  const auto refuse_if = [&](bool refused, std::string_view rule) {
    if (refused) document.fail(std::string(kTensor), std::string(rule));
  };
  refuse_if(c.ballast.adapters.has_value(),
            "layers with adapters are not cut into tiles; set it to 1");
  const QuantizedBase base = c.ballast.quantized_base;
  refuse_if(base == QuantizedBase::nf4 || base == QuantizedBase::int8,
            "layers with a ballast.quantized_base are not cut into tiles; set it to 1");
  refuse_if(!c.data.pairs.empty(),
            "preference pairs are not trained on layers in tiles; set it to 1");
}

void check_tensor_parallel(const Config& c, const Document& document, std::uint64_t ranks) {
  const std::uint64_t size = c.tensor_parallel;
  if (size == 1) return;
  const std::uint64_t heads = c.model.num_kv_heads == 0 ? c.model.num_heads : c.model.num_kv_heads;
  const auto check = [&](std::uint64_t number, const std::string& what) {
    if (number % size == 0) return;
    document.fail(
        std::string(kTensor),
        fmt::format("{} does not divide the {}; it must divide the heads of keys ({}) and "
                    "the ranks; possible: {}",
                    size, what, heads, divisors_of(std::gcd(heads, ranks))));
  };
  if (ranks > 0) check(ranks, count_of(ranks, "rank") + " of this run");
  check(heads, count_of(heads, "head") + " of keys");
}

// The devices of a rank: pipeline.stages and ballast.devices.

namespace {

constexpr std::string_view kStages = "pipeline.stages";

}  // namespace

Section pipeline_keys(PipelineSection& pipeline, std::vector<std::string>& log) {
  return with_deepspeed_keys(
      {row(kPlanOnly,
           also_called(
               or_auto(whole("stages", pipeline.stages, {1, kMaxStages}), pipeline.stages),
               {"stage", "pp_size", "pp", "num_stages", "pipeline_stages", "pipeline_parallel_size",
                "pipeline_parallel_degree", "pipeline_model_parallel_size"}),
           {"number of devices of each rank, to which the layers are dealt in turn, see "
            "[several devices](many-cards.md#several-devices). Same bits",
            "1, or the number of `ballast.devices`", "1 to 8, `\"auto\"`"})},
      "pipeline", log);
}

Key devices_key(std::vector<std::uint32_t>& devices) {
  constexpr WholeRange kNumbers = {0, 1023};
  const auto read = [&devices, kNumbers](const Value& value) {
    devices.clear();
    if (value.is_auto()) return;
    const auto numbers = value.elements("\"auto\" or an array of GPU numbers such as [0, 1]");
    if (numbers.empty() || numbers.size() > kMaxStages) {
      value.fail(fmt::format("must have 1 to {} numbers, got {}", kMaxStages, numbers.size()));
    }
    for (const Value& number : numbers) {
      devices.push_back(static_cast<std::uint32_t>(number.whole(kNumbers)));
    }
  };
  const auto write = [&devices] {
    if (devices.empty()) return Json("auto");
    Json list = Json::array();
    for (const std::uint32_t number : devices) list.push_back(number);
    return list;
  };
  return also_called({"devices", read, write}, {"gpus", "gpu_ids", "device_ids"});
}

void complete_devices(Config& config, const Document& document) {
  const auto& named = config.ballast.devices;
  std::uint32_t& stages = config.pipeline.stages;
  if (!named.empty()) {
    const auto count = static_cast<std::uint32_t>(named.size());
    if (find_given(document.root(), kStages) == nullptr) stages = count;
    if (stages > 0 && stages != count) {
      document.fail("ballast.devices",
                    fmt::format("lists {} device{}, but pipeline.stages is {}; list {}, or leave "
                                "one of the two keys out",
                                count, count == 1 ? "" : "s", stages, stages));
    }
  }
  const std::optional<step::Order> order = config.ballast.order;
  if (stages > 1 && order && *order != step::Order::layer_major) {
    document.fail("ballast.order",
                  fmt::format("is \"{}\", with which only one of the {} devices of "
                              "pipeline.stages would work at a time; use \"layer_major\" or "
                              "\"auto\"",
                              name_of(order), stages));
  }
}

void check_router_losses(const Config& config, const Document& document) {
  const std::optional<step::Order> order = config.ballast.order;
  const bool layer_major = !order || *order == step::Order::layer_major;
  const bool one = config.batch.automatic || config.batch.accumulation == 1;
  const bool spans_step = config.ballast.router_losses == model::RouterLossSpan::step &&
                          model::router_losses(config.model).any();
  if (layer_major || one || !spans_step) return;
  document.fail("ballast.order",
                fmt::format("is \"{}\", but with ballast.router_losses \"step\" all {} "
                            "micro-batches pass the routers before the first backward pass; use "
                            "\"layer_major\" or \"auto\", or set ballast.router_losses to "
                            "\"micro_batch\"",
                            name_of(order), config.batch.accumulation));
}

void check_stages(const Config& config, const Document& document) {
  const model::ModelConfig& m = config.model;
  const std::uint64_t most = m.num_layers + m.vocabulary_tiles;
  if (config.pipeline.stages <= most) return;
  document.fail(std::string(kStages),
                fmt::format("is {}, but the model has only {} layer{} and {} vocabulary tile{} to "
                            "share; give at most {}",
                            config.pipeline.stages, m.num_layers, m.num_layers == 1 ? "" : "s",
                            m.vocabulary_tiles, m.vocabulary_tiles == 1 ? "" : "s", most));
}

}  // namespace ballast::config
