#include <algorithm>
#include <array>
#include <cctype>
#include <mutex>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ballast/core/error.h"
#include "ballast/text/json.h"

#include "src/config/key_table.h"
#include "src/model/description/layer_rules.h"

namespace ballast::config {

namespace {

/// A key that does not belong to this `type` of optimizer or schedule (`kind`).
Key foreign(std::string name, std::string_view kind, std::string_view type) {
  return {std::move(name),
          [kind, type](const Value& value) {
            value.fail(fmt::format("is not a parameter of the {} \"{}\"", kind, type));
          },
          {}};
}

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

using cpu_adam::Optimizer;
using cpu_adam::OptimizerRow;
/// Optimizers of DeepSpeed (the last three of older versions) that Ballast lacks, in lower case.
constexpr std::array<std::string_view, 8> kForeignOptimizers = {
    "lamb", "muon", "muadam", "muadamw", "musgd", "onebitadam", "zerooneadam", "onebitlamb"};

Key betas_key(OptimizerSection& o) {
  return {"betas",
          [&o](const Value& value) {
            const Json& json = value.json();
            if (!json.is_array()) value.fail_type("an array of two numbers");
            if (json.elements().size() != 2) {
              value.fail(fmt::format("expected two numbers, got {}", json.elements().size()));
            }
            o.beta1 = value.element(0).real(kBelowOne);
            o.beta2 = value.element(1).real(kBelowOne);
          },
          [&o] {
            return Json::array({o.beta1, o.beta2});
          }};
}

/// AdamW accepts only true. False turns "Adam" into Adam with its own defaults, so this key is read
/// before the other parameters.
Key adam_w_mode_key(OptimizerSection& o) {
  const auto read = [&o](const Value& value) {
    if (value.flag()) return;
    if (o.type == Optimizer::adamw) {
      value.fail("the type AdamW decouples weight decay; set it to true or use the type \"Adam\"");
    }
    o = OptimizerSection::defaults(Optimizer::adam);
  };
  return {"adam_w_mode", read, [] { return Json(false); }};
}

/// A parameter of torch.optim that must be 0 in Ballast.
Key zero_key(std::string name) {
  return {std::move(name),
          [](const Value& value) {
            if (value.real({}) != 0.0) {
              value.fail(fmt::format("must be 0 in Ballast, got {}", value.json().text()));
            }
          },
          {}};
}

/// A key and the types of optimizer or schedule that have it.
template <class Type>
struct ParameterRow {
  std::vector<Type> types;
  Key key;
};

/// The keys of `type`, called `name`. Reading any other key is an error that says so.
template <class Type>
Section keys_of(Type type, std::string_view kind, std::string_view name,
                const std::vector<ParameterRow<Type>>& rows) {
  Section keys;
  for (const auto& [types, key] : rows) {
    const bool own = std::find(types.begin(), types.end(), type) != types.end();
    keys.push_back(own ? key : row(*key.effects, foreign(key.name, kind, name), key.text));
  }
  return keys;
}

/// Keeps a text until the program ends, because a KeyText only refers to its texts.
std::string_view kept(std::string text) {
  static std::mutex mutex;
  static std::set<std::string> texts;
  const std::lock_guard lock(mutex);
  return *texts.insert(std::move(text)).first;
}

/// "this (AdamW, Adam); that (Lion)": the meanings of a parameter and the optimizers that have
/// them.
std::string meanings_of(std::string_view parameter) {
  std::vector<std::pair<std::string_view, std::vector<std::string_view>>> groups;
  for (const OptimizerRow& row : cpu_adam::kOptimizers) {
    const std::string_view meaning = row.meaning_of(parameter);
    if (meaning.empty()) continue;
    auto group = std::ranges::find(groups, meaning, [](const auto& one) { return one.first; });
    if (group == groups.end()) group = groups.insert(groups.end(), {meaning, {}});
    group->second.push_back(row.title);
  }
  std::string all;
  for (const auto& [meaning, titles] : groups) {
    all += fmt::format("{}{}", all.empty() ? "" : "; ", meaning);
    if (titles.size() < cpu_adam::kOptimizers.size()) {
      all += fmt::format(" ({})", fmt::join(titles, ", "));
    }
  }
  for (const OptimizerRow& row : cpu_adam::kOptimizers) {
    for (const auto& [name, value] : row.deepspeed) {
      if (name != parameter) continue;
      all += fmt::format(
          "; DeepSpeed's default for {}: {}, see "
          "[below](#defaults-that-differ-from-deepspeeds)",
          row.title, value);
    }
  }
  return all;
}

/// The row of a parameter. `value_of` is its default.
template <class ValueOf>
ParameterRow<Optimizer> parameter_row(Key key, std::string_view note, const ValueOf& value_of,
                                      std::string_view range) {
  std::vector<Optimizer> types;
  std::string values;
  for (const OptimizerRow& of : cpu_adam::kOptimizers) {
    if (of.meaning_of(key.name).empty()) continue;
    const auto value = value_of(of.defaults);
    if (types.empty()) {
      values = fmt::format("{}", value);
    } else if (value != value_of(row_of(types.front()).defaults)) {
      values += fmt::format("; {} {}", of.title, value);
    }
    types.push_back(of.type);
  }
  const KeyText text = {kept(fmt::format("{}{}", meanings_of(key.name), note)),
                        kept(std::move(values)), range};
  return {std::move(types), row(kResultsOnly, std::move(key), text)};
}

Section optimizer_parameters(OptimizerSection& o) {
  using cpu_adam::Hyper;
  const Key mode = adam_w_mode_key(o);
  std::vector<ParameterRow<Optimizer>> rows = {
      {{Optimizer::adamw, Optimizer::adam},
       row(kResultsOnly, o.type == Optimizer::adam ? mode : accepted_only(mode),
           {"for Adam: true means AdamW, false adds the weight decay to the gradient (L2)", "true",
            "true, false"})},
      parameter_row(
          also_called(real("lr", o.lr, kPositive), {"learning_rate"}), "",
          [](const Hyper& h) { return h.learning_rate; }, "above 0"),
      parameter_row(
          betas_key(o), "",
          [](const Hyper& h) { return fmt::format("[{}, {}]", h.beta1, h.beta2); },
          "each at least 0, below 1"),
      parameter_row(
          also_called(real("eps", o.eps, kPositive), {"epsilon"}), "",
          [](const Hyper& h) { return h.epsilon; }, "above 0"),
      parameter_row(
          real("weight_decay", o.weight_decay, kNotNegative),
          ". Applies to all trained tensors except those of "
          "`ballast.weight_decay_exclude`",
          [](const Hyper& h) { return h.weight_decay; }, "at least 0"),
      parameter_row(
          real("momentum", o.momentum, kBelowOne), "", [](const Hyper& h) { return h.momentum; },
          "at least 0, below 1"),
      parameter_row(
          flag("nesterov", o.nesterov), "", [](const Hyper& h) { return h.nesterov; },
          "true, false")};
  for (const OptimizerRow& of : cpu_adam::kOptimizers) {
    for (const std::string_view name : text::words_of(of.zero_keys)) {
      rows.push_back(
          {{of.type},
           row(kResultsOnly, zero_key(std::string(name)),
               {kept(fmt::format("accepted for configs of PyTorch ({})", of.title)), "0", "0"})});
    }
  }
  return keys_of(o.type, "optimizer", name_of(o.type), rows);
}

using Schedule = SchedulerSection::Type;

Key warmup_type_key(SchedulerSection& s) {
  const std::vector<std::string> types = {"log", "linear"};
  const auto read = [&s, types](const Value& value) {
    s.warmup_linear = value.choice(types) == "linear";
  };
  return with_values(
      {"warmup_type", read, [&s] { return Json(s.warmup_linear ? "linear" : "log"); }}, types);
}

Key warmup_max_lr_key(SchedulerSection& s) {
  return {"warmup_max_lr", [&s](const Value& value) { s.warmup_max_lr = value.real(kPositive); },
          [&s] { return s.warmup_max_lr ? Json(*s.warmup_max_lr) : Json(); }};
}

Key last_batch_iteration_key() {
  return {"last_batch_iteration",
          [](const Value& value) {
            if (!value.json().is_number() || value.json().number() != -1.0) {
              value.fail("a schedule starts at the first step; remove it");
            }
          },
          {}};
}

/// Without ballast.steps, "auto" has no value yet. A linear schedule may leave the key out.
Key total_num_steps_key(SchedulerSection& s) {
  Key key = whole("total_num_steps", s.total_num_steps, {1, kSteps.high});
  key.write = [&s] {
    if (s.total_num_steps > 0) return Json(s.total_num_steps);
    return s.type == SchedulerSection::Type::linear ? Json() : Json("auto");
  };
  return key;
}

Section schedule_keys(SchedulerSection& s) {
  using enum SchedulerSection::Type;
  const std::vector<ParameterRow<Schedule>> rows = {
      {{linear, warmup_decay, warmup_cosine},
       row(kResultsOnly, total_num_steps_key(s),
           {"step at which the decay ends (linear, Decay, Cosine)",
            "linear: `ballast.steps`; others: required", "at least 1"})},
      {{warmup, warmup_decay},
       row(kResultsOnly, real("warmup_min_lr", s.warmup_min_lr, kNotNegative),
           {"learning rate at the start (WarmupLR, Decay)", "0", "at least 0"})},
      {{warmup, warmup_decay},
       row(kResultsOnly, warmup_max_lr_key(s),
           {"learning rate after the warm-up (WarmupLR, Decay; DeepSpeed's default for Decay: "
            "1e-3)",
            "`optimizer.params.lr`", "above 0"})},
      {{warmup_cosine},
       row(kResultsOnly, real("warmup_min_ratio", s.warmup_min_ratio, kShare),
           {"ratio to the learning rate at the start (Cosine)", "0", "0 to 1"})},
      {{linear, warmup, warmup_decay, warmup_cosine},
       row(kResultsOnly, whole("warmup_num_steps", s.warmup_num_steps, kSteps),
           {"steps of the warm-up (all but constant); 0 and 1 count as 2 except for linear, which "
            "a line says. So they do in DeepSpeed, but 0.19.8 refuses 0",
            "1000; linear: 0", "at least 0"})},
      {{warmup_cosine},
       row(kResultsOnly, real("cos_min_ratio", s.cos_min_ratio, kShare),
           {"ratio to the learning rate at the end (Cosine)", "1e-4", "0 to 1"})},
      {{warmup, warmup_decay, warmup_cosine},
       row(kResultsOnly, warmup_type_key(s),
           {"shape of the warm-up (WarmupLR, Decay, Cosine)", "`log`", "`log`, `linear`"})},
      {{warmup, warmup_decay, warmup_cosine},
       row(kResultsOnly, last_batch_iteration_key(),
           {"accepted for configs of DeepSpeed: a schedule starts at the first step", "-1",
            "-1"})}};
  return keys_of(s.type, "schedule", name_of(s.type), rows);
}

}  // namespace

OptimizerSection OptimizerSection::defaults(Optimizer type) {
  const OptimizerRow& row = row_of(type);
  const cpu_adam::Hyper& own = row.defaults;
  OptimizerSection section = {.type = type,
                              .adam_w_mode = type != Optimizer::adam,
                              .lr = own.learning_rate,
                              .beta1 = own.beta1,
                              .beta2 = own.beta2,
                              .eps = own.epsilon,
                              .weight_decay = own.weight_decay};
  if (!row.meaning_of("momentum").empty()) section.momentum = own.momentum;
  return section;
}

Section optimizer_keys(OptimizerSection& o, std::vector<std::string>& log) {
  const auto read_type = [&o](const Value& value) {
    const auto is_named = [&](std::string_view name) {
      return value.json().is_string() && lower(value.json().text()) == lower(std::string(name));
    };
    for (const OptimizerRow& row : cpu_adam::kOptimizers) {
      if (std::ranges::any_of(text::words_of(row.spellings), is_named)) {
        value.fail(fmt::format("\"{}\" is called {} in Ballast", value.json().text(), row.title));
      }
    }
    if (std::ranges::any_of(kForeignOptimizers, is_named)) {
      value.fail(fmt::format("\"{}\" is not in Ballast; use one of {}", value.json().text(),
                             listed(choice_names<Optimizer>())));
    }
    const auto* const found =
        std::ranges::find_if(cpu_adam::kOptimizers, is_named, &OptimizerRow::title);
    if (found == cpu_adam::kOptimizers.end()) value.fail_choice(choice_names<Optimizer>());
    const Optimizer named = found->type;
    // "Adam" means AdamW unless adam_w_mode changes it.
    o = OptimizerSection::defaults(named == Optimizer::adam ? Optimizer::adamw : named);
    o.type = named;
  };
  const auto write_type = [&o] { return Json(name_of(o.type)); };
  const auto params = [&o, &log] {
    return with_deepspeed_keys(optimizer_parameters(o), "optimizer.params", log);
  };
  Key type = with_values({"type", read_type, write_type}, choice_names<Optimizer>());
  return with_deepspeed_keys({row(kResultsAndPlan, std::move(type),
                                  {kept(fmt::format("update rule, case-insensitive: `{}`",
                                                    fmt::join(choice_names<Optimizer>(), "`, `"))),
                                   "`AdamW`", ""}),
                              row(kResultsOnly, section("params", params), {})},
                             "optimizer", log);
}

Section scheduler_keys(SchedulerSection& s) {
  Key type = choice("type", s.type);
  type.read = [read = std::move(type.read), &s](const Value& value) {
    read(value);
    if (s.type == Schedule::linear) s.warmup_num_steps = 0;  // the default of transformers
  };
  return {row(kResultsOnly, std::move(type),
              {"`constant`, transformers' `linear`, or DeepSpeed's `WarmupLR`, `WarmupDecayLR`, "
               "`WarmupCosineLR`",
               "`constant`; [without `optimizer`](#configs-without-an-optimizer): `linear`", ""}),
          section("params", [&s] { return schedule_keys(s); })};
}

Key preference_key(model::Preference& preference) {
  return section("preference", [&preference]() -> Section {
    Key loss = {"loss_type",
                [](const Value& value) {
                  if (value.text() == "sigmoid") return;
                  value.fail("only \"sigmoid\", the loss of DPO, is supported");
                },
                [] { return Json("sigmoid"); }};
    return {row(kResultsOnly, real("beta", preference.beta, kPositive),
                {"weight of the log-ratio: -log sigmoid(beta ((log pi(c) - log ref(c)) - (log "
                 "pi(r) - log ref(r)))), with chosen c and rejected r",
                 "0.1", "above 0"}),
            row(kResultsOnly,
                real("label_smoothing", preference.label_smoothing, {.low = 0.0, .high = 0.5}),
                {"e, the probability that a pair is the wrong way round: the loss is (1 - e) times "
                 "that of the pair plus e times that of the swapped pair (conservative DPO). TRL "
                 "1.16 ignores it with `loss_type` `sigmoid`",
                 "0", "0 to 0.5"}),
            row(kResultsOnly, with_values(std::move(loss), {"sigmoid"}),
                {"only `\"sigmoid\"`", "`\"sigmoid\"`", "`\"sigmoid\"`"})};
  });
}

void check_pairs(Config& config, const model::Architecture& model, const Document& document) {
  if (config.data.pairs.empty()) return;
  if (!config.ballast.adapters) {
    document.fail("ballast.train",
                  "data.pairs compares a model with the one that training began with, which is its "
                  "frozen part: set this to \"adapters\"");
  }
  if (!config.ballast.adapters->modules_to_save.empty()) {
    document.fail("ballast.adapters.modules_to_save",
                  "with data.pairs everything but the adapters stays as it is, because it is the "
                  "reference, too; remove this key");
  }
  if (model::links_layers(*model.layers)) {
    document.fail("data.pairs",
                  "models whose layers share keys and values or have embeddings (Gemma 4 E2B, E4B) "
                  "cannot be trained on pairs; use data.documents");
  }
  if (model::norms_surround_experts(*model.layers)) {
    document.fail("data.pairs",
                  "models whose experts read attention's norm or have a norm of their sum (Command "
                  "A+, Trinity) cannot be trained on pairs; use data.documents");
  }
  if (config.ballast.adapters->path.empty()) return;
  config.notes.emplace_back(
      "ballast.adapters.path: the reference of data.pairs is the model without any adapters; "
      "DPOTrainer of TRL would take these ones");
}

}  // namespace ballast::config
