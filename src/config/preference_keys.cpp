#include <algorithm>

#include "ballast/model/family.h"

#include "src/config/sections.h"

namespace ballast::config {

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
  const auto routes = [](const model::BlockSpec& block) {
    return block.part == model::LayerPart::router;
  };
  if (std::any_of(model.blocks.begin(), model.blocks.end(), routes)) {
    document.fail("data.pairs",
                  "models with experts cannot be trained on pairs; use data.documents");
  }
  if (model::links_layers(config.model)) {
    document.fail("data.pairs",
                  "models whose layers share keys and values or have embeddings (Gemma 4 E2B, E4B) "
                  "cannot be trained on pairs; use data.documents");
  }
  if (config.ballast.adapters->path.empty()) return;
  config.notes.emplace_back(
      "ballast.adapters.path: the reference of data.pairs is the model without any adapters; "
      "DPOTrainer of TRL would take these ones");
}

}  // namespace ballast::config
