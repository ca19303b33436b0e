#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ballast/core/error.h"
#include "ballast/planner/planner.h"

#include "src/planner/search.h"

namespace ballast::planner {
namespace {

constexpr const char* kVocabularyTiles = "model.vocabulary_tiles";
constexpr const char* kLayerTiles = "model.layer_tiles";
/// Numbers of tiles are doubled this often.
constexpr int kDoublings = 6;

/// Returns the excess of the closest plan over the budgets.
Bytes excess_of(const PlanRequest& request, Effort effort) {
  try {
    return find_closest_miss(request, effort).excess;
  } catch (const Error& error) {
    // The change breaks a rule that depends on sizes.
    if (error.category() != ErrorCategory::config) throw;
    return std::numeric_limits<Bytes>::max();
  }
}

}  // namespace

std::optional<PlanRequest> changed(const PlanRequest& request, const Overrides& overrides) {
  if (overrides.empty()) return request;
  if (!request.change) return std::nullopt;
  PlanRequest result = request;
  try {
    PlanRequest other = request.change(overrides);
    result.run = std::move(other.run);
    result.change = std::move(other.change);
  } catch (const Error&) {
    return std::nullopt;
  }
  const model::ModelConfig& before = request.run.model.config;
  const model::ModelConfig& now = result.run.model.config;
  if (now.vocabulary_tiles != before.vocabulary_tiles || now.layer_tiles != before.layer_tiles) {
    result.kernels = nullptr;
  }
  return result;
}

Overrides find_fitting_tiles(const PlanRequest& request, const model::OpenTiles& open) {
  const model::ModelConfig& model = request.run.model.config;
  const Bytes now = excess_of(request, Effort::quick);
  for (const auto& [vocabulary, layers] :
       {std::pair{true, false}, std::pair{false, true}, std::pair{true, true}}) {
    if ((vocabulary && !open.vocabulary) || (layers && !open.layers)) continue;
    Bytes before = now;
    for (int doubling = 1; doubling <= kDoublings; ++doubling) {
      Overrides change;
      const auto cut = [&](const char* key, std::uint64_t tiles) {
        change.push_back(fmt::format("{}={}", key, tiles << doubling));
      };
      if (vocabulary) cut(kVocabularyTiles, model.vocabulary_tiles);
      if (layers) cut(kLayerTiles, model.layer_tiles);
      const std::optional<PlanRequest> tried = changed(request, change);
      if (!tried) break;
      const Bytes excess = excess_of(*tried, Effort::quick);
      if (excess == 0) return change;
      if (excess >= before) break;  // something else needs the memory
      before = excess;
    }
  }
  return {};
}

model::ModelConfig fitting_tiles(const PlanRequest& request) {
  const model::ModelConfig& model = request.run.model.config;
  if (!request.run.open_tiles.any()) return model;
  if (excess_of(request, Effort::quick) == 0) return model;
  if (excess_of(request, Effort::thorough) == 0) return model;
  // The refusal names it, and the user decides.
  std::string missing_rate;
  if (!find_fitting_change(request, missing_rate).empty()) return model;
  const Overrides change = find_fitting_tiles(request, request.run.open_tiles);
  const std::optional<PlanRequest> cut = changed(request, change);
  if (change.empty() || !cut) return model;
  log(LogLevel::info,
      fmt::format("planner: \"auto\" takes {}, because nothing fits the budgets with fewer "
                  "tiles. Sums over other tiles are rounded in another order, so the last bits "
                  "of results differ from those of a run with larger budgets; name the key{} to "
                  "have the same bits with all budgets",
                  fmt::join(change, " and "), change.size() > 1 ? "s" : ""));
  return cut->run.model.config;
}

}  // namespace ballast::planner
