#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "ballast/config/adapter_folder.h"
#include "ballast/config/model_source.h"
#include "ballast/core/error.h"

#include "src/config/sections.h"

namespace ballast::config {
namespace {

/// Names, or one of them.
Key names(const char* name, std::vector<std::string>& target) {
  return {name,
          [&target](const Value& value) {
            target.clear();
            if (value.json().is_string()) {
              target.push_back(value.text());
              return;
            }
            if (!value.json().is_array()) value.fail_type("a name or an array of names");
            for (std::size_t i = 0; i < value.json().elements().size(); ++i) {
              target.push_back(value.element(i).text());
              if (target.back().empty()) value.element(i).fail("expected a name, got \"\"");
            }
          },
          [&target] { return list_of(target); }};
}

Section keys_of(AdapterSection& a) {
  constexpr WholeRange kRanks = {1, 65536};
  return {path("path", a.path),
          also_called(whole("rank", a.rank, kRanks), {"r", "lora_rank"}),
          also_called(real("alpha", a.alpha, kPositive), {"lora_alpha"}),
          also_called(real("dropout", a.dropout, kBelowOne), {"lora_dropout"}),
          also_called(flag("rslora", a.rslora), {"use_rslora"}),
          also_called(flag("dora", a.dora), {"use_dora"}),
          also_called(names("targets", a.targets), {"target_modules"}),
          names("modules_to_save", a.modules_to_save)};
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
        if (!value.json().is_array()) {
          value.fail_type(
              "\"all\", \"adapters\" or an array of patterns such as [\"model.layers.3.*\"]");
        }
        for (std::size_t i = 0; i < value.json().elements().size(); ++i) {
          b.train.push_back(value.element(i).text());
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
        if (!value.json().is_array()) {
          value.fail_type(
              "\"none\", \"transformers\" (biases and norms) or an array of patterns such as "
              "[\"*norm*\"]");
        }
        for (std::size_t i = 0; i < value.json().elements().size(); ++i) {
          patterns.push_back(value.element(i).text());
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

void expand_adapter_path(Document& document) {
  Json* const ballast = document.root().find("ballast");
  if (ballast == nullptr || !ballast->is_object()) return;
  Json* const section = ballast->find("adapters");
  const Json* const given =
      section == nullptr || !section->is_object() ? nullptr : section->find("path");
  if (given == nullptr || given->is_null() || *given == "") return;
  const std::filesystem::path folder = Value(document, *given, "ballast.adapters.path").path_text();
  if (const auto cause = explain_no_adapters(folder, given->text())) {
    document.fail("ballast.adapters.path", *cause);
  }
  Json found;
  try {
    found = read_adapter_folder(folder);
  } catch (const Error& error) {
    document.fail("ballast.adapters.path", error.what());
  }
  // The tensors themselves are compared with the maps that the config names.
  constexpr std::array kMustAgree = {"rank", "alpha", "rslora", "dora"};
  for (const auto& member : found.members()) {
    const Json* const own = section->find(member.key);
    if (own == nullptr || own->is_null()) {
      (*section)[member.key] = member.value;
      continue;
    }
    const bool numbers = own->is_number() && member.value.is_number();
    const bool same =
        numbers ? own->number() == member.value.number() : own->compact() == member.value.compact();
    if (same || std::find(kMustAgree.begin(), kMustAgree.end(), member.key) == kMustAgree.end()) {
      continue;
    }
    document.fail(fmt::format("ballast.adapters.{}", member.key),
                  fmt::format("is {}, but the adapters at ballast.adapters.path have {}; remove "
                              "one of the two keys",
                              own->compact(), member.value.compact()));
  }
}

}  // namespace ballast::config
