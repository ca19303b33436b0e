#include <algorithm>
#include <array>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "ballast/config/adapter_folder.h"
#include "ballast/config/hugging_face_config.h"
#include "ballast/config/stored_model.h"
#include "ballast/core/error.h"
#include "ballast/model/family.h"

#include "src/config/adapter_config.h"
#include "src/config/config_tree.h"
#include "src/config/key_table.h"

namespace ballast::config {
namespace {

/// A key for one name or a list of names.
Key names(const char* name, std::vector<std::string>& target) {
  return text_list(name, target, "a name or an array of names", [](const Value& value) {
    std::string found = value.text();
    if (found.empty()) value.fail("expected a name, got \"\"");
    return found;
  });
}

/// A key for numbers by patterns of module names.
Key patterns(const char* name, model::ModulePatterns& target) {
  return {name,
          [name, &target](const Value& value) {
            target = read_patterns(value.json(), name,
                                   [&](const std::string& rule) { value.fail(rule); });
          },
          [&target] { return write_patterns(target); }};
}

Section keys_of(AdapterSection& a) {
  constexpr WholeRange kRanks = {1, 65536};
  return {
      row(kPlanOnly, path("path", a.path),
          {"PEFT folder (`adapter_config.json`, `adapter_model.safetensors`) to start from. It "
           "gives all other keys of this section; `rank`, `alpha`, their patterns, `rslora` and "
           "`dora` may be "
           "given only with the same values",
           "none: new adapters", "folder"}),
      row(kResultsAndPlan, also_called(whole("rank", a.rank, kRanks), {"r", "lora_rank"}),
          {"rows of A [rank, in] and columns of B [out, rank]", "8", "1 to 65536"}),
      row(kResultsAndPlan, also_called(real("alpha", a.alpha, kPositive), {"lora_alpha"}),
          {"s = alpha / rank", "8", "above 0"}),
      row(kResultsAndPlan, patterns(kRankPattern, a.rank_pattern),
          {"object of ranks for modules whose names match, as in PEFT: regular expressions for a "
           "name or its end (`\"layers\\\\.0\\\\..*\"`, `\"q_proj\"`). The first that matches "
           "counts",
           "none", "object"}),
      row(kResultsAndPlan, patterns(kAlphaPattern, a.alpha_pattern),
          {"object of alphas for such modules. A module's scale follows from its rank and its "
           "alpha",
           "none", "object"}),
      row(kResultsAndPlan, also_called(real("dropout", a.dropout, kBelowOne), {"lora_dropout"}),
          {"probability that an element of A's input is dropped in training", "0", "0 to below 1"}),
      row(kResultsAndPlan, also_called(flag("rslora", a.rslora), {"use_rslora"}),
          {"s = alpha / sqrt(rank) (rsLoRA)", "false", "true, false"}),
      row(kResultsAndPlan, also_called(flag("dora", a.dora), {"use_dora"}),
          {"DoRA: trained magnitudes of the outputs, see [adapters](fine-tuning.md#adapters). Not "
           "together with "
           "`dropout`",
           "false", "true, false"}),
      row(kResultsAndPlan, also_called(names("targets", a.targets), {"target_modules"}),
          {"linear layers that get a low-rank adapter, like PEFT's `target_modules`: names or "
           "their last parts (`\"q_proj\"`, `\"mlp.c_proj\"`), also of experts and routers, see "
           "[adapters of experts](fine-tuning.md#adapters-of-experts), or `\"all-linear\"` for all "
           "of attention and dense MLPs",
           "required", "name, list of names, `\"all-linear\"`"}),
      row(kResultsAndPlan, names("modules_to_save", a.modules_to_save),
          {"further modules that are trained in full: module names or their ends (`\"lm_head\"`), "
           "as in PEFT, or patterns of tensor names as in `ballast.train`",
           "none", "name, list"})};
}

}  // namespace

Key train_key(BallastSection& b) {
  Key key = {
      "train",
      [&b](const Value& value) {
        b.train.clear();
        b.adapters.reset();
        if (value.json() == "all") return;
        if (value.json() == "adapters") {
          b.adapters.emplace();
          return;
        }
        for (const Value& item : value.elements(
                 "\"all\", \"adapters\" or an array of patterns such as [\"model.layers.3.*\"]")) {
          b.train.push_back(item.text());
        }
        if (b.train.empty()) {
          value.fail("names no tensor; give patterns, \"all\" or \"adapters\"");
        }
      },
      [&b] {
        if (b.adapters) return Json("adapters");
        return b.train.empty() ? Json("all") : list_of(b.train);
      }};
  return with_values(std::move(key), {"all", "adapters"});
}

Key weight_decay_exclude_key(BallastSection& b) {
  Key key = {
      "weight_decay_exclude",
      [&b](const Value& value) {
        const std::string word(model::kTransformersExempt);
        std::vector<std::string>& patterns = b.weight_decay_exclude;
        patterns.clear();
        if (value.json() == "none") return;
        if (value.json() == word) {
          patterns.push_back(word);
          return;
        }
        for (const Value& item : value.elements(
                 "\"none\", \"transformers\" (biases and norms) or an array of patterns such as "
                 "[\"*norm*\"]")) {
          patterns.push_back(item.text());
        }
      },
      [&b] {
        const std::vector<std::string>& patterns = b.weight_decay_exclude;
        if (patterns.empty()) return Json("none");
        const bool word = patterns.size() == 1 && patterns[0] == model::kTransformersExempt;
        return word ? Json(patterns[0]) : list_of(patterns);
      }};
  return with_values(std::move(key), {"none", std::string(model::kTransformersExempt)});
}

Key adapters_key(BallastSection& b) {
  Key key = {"adapters",
             [&b](const Value& value) {
               if (!b.adapters) {
                 value.fail(
                     "is given, but ballast.train is not \"adapters\"; set it to that, or "
                     "remove this section");
               }
               read_section(value, keys_of(*b.adapters));
             },
             [&b] { return b.adapters ? write_section(keys_of(*b.adapters)) : Json(); }};
  key.inner = [] {
    static AdapterSection any;
    return keys_of(any);
  };
  return key;
}

namespace {

/// Replaces the number of an expert in the name of one of its maps by "*".
std::string of_any_expert(std::string module) {
  constexpr std::string_view kExperts = ".experts.";
  const std::size_t begin = module.find(kExperts);
  if (begin == std::string::npos) return module;
  const std::size_t first = begin + kExperts.size();
  const std::size_t end = module.find('.', first);
  if (end == std::string::npos) return module;
  return module.replace(first, end - first, "*");
}

/// Replaces targets such as "up_proj", which in a family with experts may also name their maps, by
/// the modules that have adapters in the PEFT folder. `section`: keys of ballast.adapters.
void name_dense_targets(Json& section, std::string_view family,
                        const std::filesystem::path& folder) {
  const auto details = model::family(family).details();
  const bool experts = std::ranges::any_of(
      details, [](const model::DetailKey& key) { return key.name == "num_experts_per_tok"; });
  Json* const targets = section.find("targets");
  if (!experts || targets == nullptr) return;
  const auto names = stored_names(folder / kAdapterWeights);
  Json named = Json::array();
  for (const Json& target : targets->elements()) {
    const bool ambiguous =
        is_named_like_expert(target.text()) && target.text().find(".layers.") == std::string::npos;
    const std::string end = "." + target.text() + ".lora_A.weight";
    std::set<std::string> found;
    for (const std::string& name : names.value_or(std::set<std::string>())) {
      if (!ambiguous || !name.starts_with(kAdapterPrefix) || !name.ends_with(end)) continue;
      const std::size_t begin = std::string_view(kAdapterPrefix).size();
      const std::size_t size = name.rfind(".lora_A") - begin;
      found.insert(of_any_expert(name_in_text_model(name.substr(begin, size))));
    }
    if (found.empty()) found = {target.text()};
    for (const std::string& name : found) named.push_back(name);
  }
  *targets = std::move(named);
}

}  // namespace

void expand_adapter_path(Document& document) {
  Json* const section = find_path(document.root(), "ballast.adapters");
  const Json* const given = section == nullptr ? nullptr : find_given(*section, "path");
  if (given == nullptr || *given == "") return;
  const std::filesystem::path folder = Value(document, *given, "ballast.adapters.path").path_text();
  if (const auto cause = explain_no_adapters(folder, given->text())) {
    document.fail("ballast.adapters.path", *cause);
  }
  Json found;
  try {
    found = read_adapter_folder(folder);
    const Json* const family = find_given(document.root(), "model.family");
    if (family != nullptr) name_dense_targets(found, family->text(), folder);
  } catch (const Error& error) {
    document.fail("ballast.adapters.path", error.what());
  }
  // The other keys are compared through the tensors that they determine.
  constexpr std::array kMustAgree = {"rank",        "alpha",  kRankPattern,
                                     kAlphaPattern, "rslora", "dora"};
  for (const auto& member : found.members()) {
    const Json* const own = find_given(*section, member.key);
    if (own == nullptr) {
      (*section)[member.key] = member.value;
      continue;
    }
    if (are_equal(*own, member.value) ||
        std::find(kMustAgree.begin(), kMustAgree.end(), member.key) == kMustAgree.end()) {
      continue;
    }
    document.fail(fmt::format("ballast.adapters.{}", member.key),
                  fmt::format("is {}, but the adapters at ballast.adapters.path have {}; remove "
                              "one of the two keys",
                              own->compact(), member.value.compact()));
  }
}

}  // namespace ballast::config
