#include <exception>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/config/key_effects.h"
#include "ballast/core/error.h"
#include "ballast/model/family.h"

#include "src/model/description/families/families.h"
#include "tests/unit/config/samples.h"

namespace ballast::config::print_test {
namespace {

using test::error_of;
using test::kMinimal;
using test::parse_text;
using test::samples;
using test::with;

TEST(ConfigPrint, OfEverySampleReadsBackAsTheSameConfig) {
  for (const auto& text : samples()) {
    const Config config = parse_text(text);
    const std::string printed = print(config);
    const Config again = parse(printed, "/elsewhere", "printed.json", {});
    EXPECT_EQ(print(again), printed) << text;
    EXPECT_TRUE(again.ignored.empty()) << again.ignored.front();
  }
}

TEST(ConfigPrint, ReadsBackBitForBit) {
  for (const double value : {0.1, 1e-3, 3e-4, 1.0 / 3.0, 5e-324, 1.7976931348623157e308, 2.0}) {
    Config config = parse_text(kMinimal);
    config.optimizer.lr = value;
    EXPECT_EQ(parse_text(print(config)).optimizer.lr, value);
  }
}

AioSection unusual_aio() {
  return {.block_size = 8192,
          .queue_depth = 5,
          .backend = IoBackend::threads,
          .in_flight_bytes = 12288,
          .stall_seconds = 1.5,
          .abandon_seconds = 2.5,
          .sqpoll = true,
          .iopoll = true,
          .buffered = false,
          .any_file_system = true,
          .paths = {{.path = "/n1",
                     .block_size = 16384,
                     .queue_depth = 6,
                     .backend = IoBackend::io_uring,
                     .read_gbps = 0.1,
                     .write_gbps = 1.0 / 3.0},
                    {.path = "/n3"}}};
}

/// No field has its default, so that a field that print() or parse() omits is detected.
Config unusual() {
  Config c;
  c.model = {.family = "llama",
             .vocab_size = 300,
             .hidden_size = 64,
             .num_layers = 5,
             .num_heads = 8,
             .num_kv_heads = 4,
             .head_dim = 24,
             .intermediate_size = 100,
             .max_sequence = 64,
             .norm_epsilon = 1e-6,
             .tie_embeddings = true,
             .vocabulary_tiles = 1,
             .layer_tiles = 1,
             .init_stddev = 0.01,
             .details = {{"rope_theta", 5e5},
                         {"rope_scaling", {}},
                         {"attention_bias", true},
                         {"mlp_bias", true},
                         {"pad_token_id", 7}}};
  c.initial_weights = "/w";
  c.data = {.text = {},
            .tokens = {"/t"},
            .token_type = TokenType::u32,
            .sequence_length = 16,
            .held_out = 0.25,
            .shuffle = false,
            .as_is = true};
  c.optimizer = {.lr = 0.5, .beta1 = 0.8, .beta2 = 0.7, .eps = 1e-4, .weight_decay = 0.2};
  c.scheduler = {.type = SchedulerSection::Type::warmup_decay,
                 .warmup_min_lr = 0.1,
                 .warmup_max_lr = 0.3,
                 .warmup_num_steps = 7,
                 .warmup_linear = true,
                 .total_num_steps = 70};
  c.batch = {.train_batch = 12, .micro_batch = 3, .accumulation = 4};
  c.zero = {.stage = 3,
            .persistence_threshold = 4096,
            .hpz_partition_size = 4,
            .quantized_weights = true,
            .optimizer = {.tier = Tier::nvme, .nvme_path = {"/n1"}},
            .parameters = {.tier = std::nullopt, .nvme_path = {"/n2", "/n3"}}};
  c.buffers = {.weight_slots = 6,
               .gradient_slots = 1,
               .weight_staging = 5,
               .state_staging = 3,
               .activation_staging = 7,
               .gradient_staging = 8};
  c.aio = unusual_aio();
  c.type = DType::f32;
  c.gradient_clipping = 0.75;
  c.steps_per_print = 3;
  c.tensorboard = {.enabled = true, .output_path = "/logs", .job_name = "a/b"};
  c.csv_monitor = {.enabled = true, .output_path = "/tables", .job_name = "c"};
  c.ballast = {.device = DeviceChoice::cuda,
               .kernels = model::KernelSet::plain,
               .gpu_checks = model::GpuChecks::each,
               .attention = model::AttentionBackend::own,
               .product_algorithms = ProductSearch::timed,
               .device_bytes = 11,
               .host_bytes = 12,
               .quantized_base = QuantizedBase::none,
               .order = step::Order::micro_batch_major,
               .update = step::Update::gated,
               .serial = true,
               .nvtx = true,
               .delay_seed = 26,
               .activations = Tier::nvme,
               .kept = step::Kept::nothing,
               .compute_threads = 3,
               .update_threads = 4,
               .update_isa = Isa::avx512,
               .update_numa_node = 3,
               .optimizer_states = cpu_adam::Moments::Format::blockwise8,
               .link_gbps = 2.5,
               .placement = {{{.weights = Tier::host,
                               .optimizer = std::nullopt,
                               .activations = Tier::nvme,
                               .kept = step::Kept::attention},
                              1,
                              2}},
               .steps = 21,
               .seed = 22,
               .eval_every = 23,
               .eval_batches = 24,
               .stop_at_loss = 1.5,
               .save_weights = false,
               .checkpoint_every = 50,
               .checkpoint_keep = 3,
               .max_skipped_steps = 25,
               .spike = {.action = SpikeSection::Action::rollback,
                         .window = 30,
                         .factor = 4.5,
                         .most_rollbacks = 7},
               .on_error = OnError::resume,
               .comm_timeout_seconds = 27.5,
               .out = "/o"};
  return c;
}

TEST(ConfigPrint, LosesNoField) {
  const Config before = unusual();
  const Config after = parse_text(print(before));
  EXPECT_EQ(print(after), print(before));
  EXPECT_EQ(after.model.family, before.model.family);
  EXPECT_EQ(after.model.vocab_size, before.model.vocab_size);
  EXPECT_EQ(after.model.num_kv_heads, before.model.num_kv_heads);
  EXPECT_EQ(after.model.intermediate_size, before.model.intermediate_size);
  EXPECT_EQ(after.model.max_sequence, before.model.max_sequence);
  EXPECT_EQ(after.model.norm_epsilon, before.model.norm_epsilon);
  EXPECT_EQ(after.model.head_dim, before.model.head_dim);
  ASSERT_EQ(after.model.details.size(), before.model.details.size());
  for (const auto& [key, value] : before.model.details) {
    EXPECT_EQ(after.model.detail(key).compact(), value.compact()) << key;
  }
  EXPECT_EQ(after.model.tie_embeddings, before.model.tie_embeddings);
  EXPECT_EQ(after.model.init_stddev, before.model.init_stddev);
  EXPECT_EQ(after.initial_weights, before.initial_weights);
  EXPECT_EQ(after.data.tokens, before.data.tokens);
  EXPECT_EQ(after.data.token_type, before.data.token_type);
  EXPECT_EQ(after.data.held_out, before.data.held_out);
  EXPECT_EQ(after.data.eval, before.data.eval);
  EXPECT_EQ(after.data.shuffle, before.data.shuffle);
  EXPECT_EQ(after.data.as_is, before.data.as_is);
  EXPECT_EQ(after.optimizer.beta1, before.optimizer.beta1);
  EXPECT_EQ(after.optimizer.beta2, before.optimizer.beta2);
  EXPECT_EQ(after.optimizer.eps, before.optimizer.eps);
  EXPECT_EQ(after.optimizer.weight_decay, before.optimizer.weight_decay);
  EXPECT_EQ(after.scheduler.type, before.scheduler.type);
  EXPECT_EQ(after.scheduler.warmup_min_lr, before.scheduler.warmup_min_lr);
  EXPECT_EQ(after.scheduler.warmup_max_lr, before.scheduler.warmup_max_lr);
  EXPECT_EQ(after.scheduler.warmup_num_steps, before.scheduler.warmup_num_steps);
  EXPECT_EQ(after.scheduler.warmup_linear, before.scheduler.warmup_linear);
  EXPECT_EQ(after.scheduler.total_num_steps, before.scheduler.total_num_steps);
}

TEST(ConfigPrint, LosesNoFieldOfTheEngine) {
  const Config before = unusual();
  const Config after = parse_text(print(before));
  EXPECT_EQ(after.zero.stage, before.zero.stage);
  EXPECT_EQ(after.zero.persistence_threshold, before.zero.persistence_threshold);
  EXPECT_EQ(after.zero.hpz_partition_size, before.zero.hpz_partition_size);
  EXPECT_EQ(after.zero.quantized_weights, before.zero.quantized_weights);
  EXPECT_EQ(after.zero.optimizer.tier, before.zero.optimizer.tier);
  EXPECT_EQ(after.zero.optimizer.nvme_path, before.zero.optimizer.nvme_path);
  EXPECT_EQ(after.buffers, before.buffers);
  EXPECT_EQ(after.zero.parameters.tier, before.zero.parameters.tier);
  EXPECT_EQ(after.zero.parameters.nvme_path, before.zero.parameters.nvme_path);
  EXPECT_EQ(after.aio.block_size, before.aio.block_size);
  EXPECT_EQ(after.aio.queue_depth, before.aio.queue_depth);
  EXPECT_EQ(after.aio.backend, before.aio.backend);
  EXPECT_EQ(after.aio.in_flight_bytes, before.aio.in_flight_bytes);
  EXPECT_EQ(after.aio.stall_seconds, before.aio.stall_seconds);
  EXPECT_EQ(after.aio.abandon_seconds, before.aio.abandon_seconds);
  EXPECT_EQ(after.aio.sqpoll, before.aio.sqpoll);
  EXPECT_EQ(after.aio.iopoll, before.aio.iopoll);
  EXPECT_EQ(after.aio.any_file_system, before.aio.any_file_system);
  EXPECT_EQ(after.aio.paths, before.aio.paths);
  EXPECT_TRUE(parse_text(print(before), {"aio.buffered=true", "aio.iopoll=false"}).aio.buffered);
  EXPECT_EQ(after.type, before.type);
  EXPECT_EQ(after.gradient_clipping, before.gradient_clipping);
  EXPECT_EQ(after.steps_per_print, before.steps_per_print);
  for (const auto monitor : {&Config::tensorboard, &Config::csv_monitor}) {
    EXPECT_EQ((after.*monitor).enabled, (before.*monitor).enabled);
    EXPECT_EQ((after.*monitor).output_path, (before.*monitor).output_path);
    EXPECT_EQ((after.*monitor).job_name, (before.*monitor).job_name);
  }
  const auto& a = after.ballast;
  const auto& b = before.ballast;
  EXPECT_EQ(a.device, b.device);
  EXPECT_EQ(a.kernels, b.kernels);
  EXPECT_EQ(a.gpu_checks, b.gpu_checks);
  EXPECT_EQ(a.attention, b.attention);
  EXPECT_EQ(a.product_algorithms, b.product_algorithms);
  EXPECT_EQ(a.device_bytes, b.device_bytes);
  EXPECT_EQ(a.host_bytes, b.host_bytes);
  EXPECT_EQ(a.order, b.order);
  EXPECT_EQ(a.serial, b.serial);
  EXPECT_EQ(a.nvtx, b.nvtx);
  EXPECT_EQ(a.delay_seed, b.delay_seed);
  EXPECT_EQ(a.activations, b.activations);
  EXPECT_EQ(a.kept, b.kept);
  EXPECT_EQ(a.gradients, b.gradients);
  EXPECT_EQ(a.compute_threads, b.compute_threads);
  EXPECT_EQ(a.update_threads, b.update_threads);
  EXPECT_EQ(a.update_isa, b.update_isa);
  EXPECT_EQ(a.update_numa_node, b.update_numa_node);
  EXPECT_EQ(a.optimizer_states, b.optimizer_states);
  EXPECT_EQ(a.link_gbps, b.link_gbps);
  ASSERT_EQ(a.placement.size(), 1U);
  EXPECT_EQ(a.placement[0].first_block, 1U);
  EXPECT_EQ(a.placement[0].last_block, 2U);
  EXPECT_EQ(a.placement[0].weights, b.placement[0].weights);
  EXPECT_EQ(a.placement[0].optimizer, b.placement[0].optimizer);
  EXPECT_EQ(a.placement[0].kept, b.placement[0].kept);
  EXPECT_EQ(a.placement[0].activations, b.placement[0].activations);
  EXPECT_EQ(a.steps, b.steps);
  EXPECT_EQ(a.seed, b.seed);
  EXPECT_EQ(a.eval_every, b.eval_every);
  EXPECT_EQ(a.eval_batches, b.eval_batches);
  EXPECT_EQ(a.stop_at_loss, b.stop_at_loss);
  EXPECT_EQ(a.save_weights, b.save_weights);
  EXPECT_EQ(a.checkpoint_every, b.checkpoint_every);
  EXPECT_EQ(a.checkpoint_keep, b.checkpoint_keep);
  EXPECT_EQ(a.max_skipped_steps, b.max_skipped_steps);
  EXPECT_EQ(a.spike.action, b.spike.action);
  EXPECT_EQ(a.spike.window, b.spike.window);
  EXPECT_EQ(a.spike.factor, b.spike.factor);
  EXPECT_EQ(a.spike.most_rollbacks, b.spike.most_rollbacks);
  EXPECT_EQ(a.on_error, b.on_error);
  EXPECT_EQ(a.comm_timeout_seconds, b.comm_timeout_seconds);
  EXPECT_EQ(a.out, b.out);
}

TEST(ConfigPrint, IsReadBackForTheSameNumberOfRanks) {
  for (const std::uint64_t world : {1U, 2U, 3U, 8U}) {
    const Config before = parse_text(kMinimal,
                                     {"train_batch_size=\"auto\"", "gradient_accumulation_steps=5",
                                      "train_micro_batch_size_per_gpu=2"},
                                     world);
    const Config after = parse_text(print(before), {}, world);
    EXPECT_EQ(after.batch.train_batch, 10 * world);
    EXPECT_EQ(after.batch.accumulation, 5U);
    EXPECT_EQ(print(after), print(before));
    EXPECT_NE(error_of(print(before), {}, world + 1), "");
  }
}

TEST(ConfigPrint, ShowsAutoWhereThePlannerChooses) {
  const auto json = nlohmann::json::parse(print(parse_text(kMinimal)));
  for (const char* key : {"device", "attention", "device_bytes", "host_bytes", "compute_threads",
                          "update_threads", "update_isa", "update_numa_node"}) {
    EXPECT_EQ(json["ballast"][key], "auto") << key;
  }
  EXPECT_EQ(json["aio"]["backend"], "auto");
  EXPECT_EQ(json["zero_optimization"]["offload_param"]["device"], "none");
}

std::string read(const std::filesystem::path& file) {
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

std::vector<Config> configs_with_every_key() {
  std::vector<Config> configs = {unusual()};
  for (const auto& text : samples()) configs.push_back(parse_text(text));
  for (const std::string& family : model::family_names()) {
    configs.push_back(parse_text(kMinimal));
    configs.back().model = model::default_config(family);
  }
  for (const cpu_adam::OptimizerRow& row : cpu_adam::kOptimizers) {
    const std::string type(row.title);
    configs.push_back(parse_text(kMinimal));
    configs.back().optimizer =
        parse_text(test::with(fmt::format(R"("optimizer": {{"type": "{}"}})", type))).optimizer;
  }
  for (int type = 0; type < 5; ++type) {
    configs.push_back(parse_text(kMinimal));
    configs.back().scheduler.type = static_cast<SchedulerSection::Type>(type);
  }
  return configs;
}

TEST(Resumption, EveryPrintedKeyHasARow) {
  const std::vector<KeyInfo> rows = key_rows();
  for (const Config& config : configs_with_every_key()) {
    for (const auto& [key, value] : all_settings(config)) {
      EXPECT_NE(std::ranges::find(rows, key, &KeyInfo::path), rows.end()) << key;
    }
  }
}

TEST(Resumption, KeysOfOtherVersionsHaveTheEffectsOfTheirSection) {
  const auto role = [](std::string_view path) { return effects_of(path).on_resume; };
  EXPECT_EQ(role("model.new_key"), KeyRole::mathematics);
  EXPECT_EQ(role("model.weights"), KeyRole::free);
  EXPECT_EQ(effects_of("scheduler.params.new_key").on_plan, PlanRole::free);
  EXPECT_EQ(role("ballast.new_key"), KeyRole::mathematics);
}

/// Keys of changes that must be allowed when a run resumes with `overrides`.
std::vector<std::string> changed_by(const std::vector<std::string>& overrides) {
  const std::string given = with(R"("optimizer": {"type": "AdamW"})");
  const Settings before = settings_of(parse_text(given));
  std::vector<std::string> keys;
  for (const SettingChange& change :
       find_changes(before, settings_of(parse_text(given, overrides)))) {
    keys.push_back(change.key);
  }
  return keys;
}

TEST(Resumption, FindsChangesOfResultsAndNoOthers) {
  using Keys = std::vector<std::string>;
  EXPECT_EQ(changed_by({"ballast.steps=9", "zero_optimization.stage=2", "ballast.device_bytes=1GiB",
                        "zero_optimization.offload_param.device=cpu", "steps_per_print=7",
                        "ballast.checkpoint_every=3", "ballast.out=/other", "aio.queue_depth=3",
                        "ballast.order=micro_batch_major", "tensorboard.enabled=true",
                        "ballast.on_error=resume", "ballast.eval_batches=3", "data.eval=[\"e\"]",
                        "data.held_out=null"}),
            (Keys{"data.held_out"}));  // files for evaluation leave all of the data to training
  EXPECT_EQ(changed_by({"ballast.seed=9"}), (Keys{"ballast.seed"}));
  EXPECT_EQ(changed_by({"gradient_clipping=0.5"}), (Keys{"gradient_clipping"}));
  EXPECT_EQ(changed_by({"optimizer.params.lr=0.5"}), (Keys{"optimizer.params.lr"}));
  EXPECT_EQ(changed_by({"bf16.enabled=false"}), (Keys{"bf16.enabled"}));
  EXPECT_EQ(changed_by({R"(optimizer={"type": "Lion"})"}).back(), "optimizer.type");
  EXPECT_EQ(changed_by({R"(scheduler={"type": "WarmupLR"})"}), (Keys{"scheduler.type"}));
  EXPECT_EQ(changed_by({"fp16.loss_scale=8"}), (Keys{}));  // has no effect in bf16
  EXPECT_EQ(changed_by({"ballast.router_losses=micro_batch"}), (Keys{}));
  const auto balanced = [](const std::string& losses) {
    return settings_of(parse_text(
        kMinimal,
        {R"(model={"family": "mixtral", "hidden_size": 32, "num_layers": 1, "num_heads": 2,
                             "intermediate_size": 32, "num_local_experts": 4,
                             "output_router_logits": true})",
         "ballast.router_losses=" + losses}));
  };
  EXPECT_EQ(find_changes(balanced("step"), balanced("micro_batch")).front().key,
            "ballast.router_losses");
}

TEST(Resumption, RefusesWhatIsNotAllowedInOneLine) {
  const std::vector<SettingChange> changes = {{"optimizer.params.lr", "0.1", "0.2"},
                                              {"optimizer.type", R"("AdamW")", R"("Lion")"},
                                              {"ballast.seed", "1", "2"}};
  const auto refusal = [&](const std::vector<std::string>& allowed,
                           const std::vector<SettingChange>& of) -> std::string {
    try {
      refuse_changes(of, allowed, "step-2");
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(refusal({}, changes),
            "step-2: the config changes what the run computes: optimizer.params.lr 0.1 -> 0.2, "
            "optimizer.type \"AdamW\" -> \"Lion\", ballast.seed 1 -> 2; set them to those of the "
            "checkpoint, or accept them with --allow-change optimizer --allow-change ballast.seed");
  EXPECT_EQ(refusal({"all"}, changes), "");
  EXPECT_EQ(refusal({"optimizer", "ballast.seed"}, changes), "");
  EXPECT_NE(refusal({"optimizer.params", "ballast.seed"}, changes), "");
  EXPECT_NE(refusal({"all"}, {{"train_batch_size", "4", "8"}}).find("which cannot change"),
            std::string::npos);
  for (const char* name : {"all", "optimizer", "optimizer.params.lr", "data.text",
                           "model.rope_theta", "ballast.spike", "scheduler"}) {
    EXPECT_NO_THROW(check_allowed_names({name})) << name;
  }
  for (const char* name : {"", "ballast", "ballast.out", "train_batch_size", "optimizers", "x.y"}) {
    EXPECT_THROW(check_allowed_names({name}), Error) << name;
  }
}

/// Names of families in a cell of a table: words, and those that a group of families has.
std::set<std::string> families_in(const std::string& cell) {
  std::set<std::string> found;
  for (const std::string& family : model::family_names()) {
    const std::regex word("(^|[^A-Za-z0-9_])" + family + "([^A-Za-z0-9_]|$)");
    if (std::regex_search(cell, word)) found.insert(family);
  }
  if (cell.find("atent attention") != std::string::npos) {
    found.insert({"deepseek_v3", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa", "mistral4"});
  }
  // "(not A, B)": all others.
  std::smatch excluded;
  if (!std::regex_search(cell, excluded, std::regex(R"(\(not ((gpt2|gpt_neox|, )+)\))")))
    return found;
  for (const std::string& family : model::family_names()) found.insert(family);
  for (const std::string& family : families_in(excluded[1].str())) found.erase(family);
  return found;
}

TEST(ConfigManual, NamesTheFamiliesThatHaveAKey) {
  const std::string page = read(std::filesystem::path(BALLAST_CONFIGS) / "keys.md");
  std::set<std::string> keys;
  for (const std::string& family : model::family_names()) {
    for (const auto& detail : model::family(family).details()) keys.insert(detail.name);
  }
  for (const std::string& key : keys) {
    const std::string start = "| `model." + key + "` | ";
    const std::size_t at = page.find(start);
    ASSERT_NE(at, std::string::npos) << key;
    const std::size_t begin = at + start.size();
    const std::string meaning = page.substr(begin, page.find(" |", begin) - begin);
    const std::vector<std::string> own = model::families_with_key(key);
    EXPECT_EQ(families_in(meaning), std::set<std::string>(own.begin(), own.end())) << key;
  }
}

TEST(ShippedConfigs, AreValidAndIgnoreNothing) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(BALLAST_CONFIGS)) {
    if (entry.path().extension() != ".json") continue;
    ++count;
    // A Hugging Face folder of the user.
    std::vector<std::string> other_model;
    if (read(entry.path()).find(R"("model": {"path")") != std::string::npos) {
      other_model = {R"(model={"hidden_size": 64, "num_layers": 1, "num_heads": 4})"};
    }
    constexpr std::uint64_t kUnknownRanks = 0;
    const Config config = load(entry.path(), other_model, kUnknownRanks);
    EXPECT_TRUE(config.ignored.empty()) << entry.path();
    EXPECT_GT(config.ballast.steps, 0U) << entry.path();
  }
  EXPECT_GE(count, 2);
}

TEST(ConfigPrint, WritesTheNewNameOfAChoiceThatHasAFormerOne) {
  const Config c = parse_text(kMinimal, {"ballast.expert_updates=touched"});
  EXPECT_EQ(c.ballast.expert_updates, step::ExpertUpdates::active);
  EXPECT_NE(print(c).find("\"expert_updates\": \"active\""), std::string::npos);
}

}  // namespace
}  // namespace ballast::config::print_test
