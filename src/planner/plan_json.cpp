#include "ballast/planner/plan_json.h"

#include <utility>

#include "ballast/plan/bottleneck.h"
#include "ballast/planner/plan_choices.h"

namespace ballast::planner {
namespace {

using text::Json;

Json ledger_json(const memory::Ledger& ledger) {
  Json list = Json::array();
  for (const memory::LedgerLine& line : ledger.lines()) {
    Json one =
        Json::object({{"tier", to_string(line.tier)}, {"kind", line.kind}, {"bytes", line.bytes}});
    if (ledger.devices() > 1 && line.tier == Tier::device) one["device"] = line.device;
    list.push_back(std::move(one));
  }
  return list;
}

Json lanes_json(const plan::Prediction& prediction, std::uint32_t devices) {
  Json lanes = Json::object();
  for (const plan::Lane lane : plan::lanes_of(devices)) {
    const auto i = static_cast<std::size_t>(lane);
    lanes[to_string(lane)] = Json::object({{"busy_seconds", prediction.busy_seconds.at(i)},
                                           {"stalled_seconds", prediction.stalled_seconds.at(i)},
                                           {"bytes", prediction.bytes.at(i)}});
    if (devices == 1 || !is_per_device(lane)) continue;
    Json busy = Json::array();
    for (std::uint8_t device = 0; device < devices; ++device) {
      busy.push_back(prediction.busy_seconds_by_number.at(plan::lane_number(lane, device)));
    }
    lanes[to_string(lane)]["busy_seconds_by_device"] = std::move(busy);
  }
  return lanes;
}

Json bounds_json(const plan::Prediction& prediction) {
  Json list = Json::array();
  for (const auto& bound : prediction.bounds) {
    list.push_back(Json::object({{"lane", to_string(bound.lane)}, {"seconds", bound.seconds}}));
  }
  return list;
}

/// bottleneck, second_bottleneck: lanes. bound_by: the resource of the first, null if no lane is
/// busy for nearly all of the step.
void add_bottleneck(const plan::Prediction& prediction, Json& out) {
  const plan::Bottleneck found =
      plan::find_bottleneck(prediction.busy_seconds, prediction.step_seconds);
  out["bottleneck"] = to_string(found.lane);
  out["second_bottleneck"] = found.second ? Json(to_string(*found.second)) : Json();
  out["bound_by"] = found.bounds() ? Json(resource_of(found.lane)) : Json();
}

Json placement_json(const step::Placement& placement) {
  Json list = Json::array();
  for (const auto& block : placement.blocks) list.push_back(block_json(block));
  return list;
}

}  // namespace

Json plan_json(const engine::Blueprint& blueprint, const plan::Prediction* prediction) {
  Json out;
  if (prediction != nullptr) out["predicted_step_seconds"] = prediction->step_seconds;
  out["ledger"] = ledger_json(blueprint.ledger);
  out["budgets"] =
      Json::object({{"device", blueprint.budgets.device}, {"host", blueprint.budgets.host}});
  for (const Tier tier : kTiers) {
    out["peak_bytes"][to_string(tier)] = blueprint.ledger.needed(tier);
  }
  out["parameters"] = blueprint.model.parameters();
  out["world"] = blueprint.mesh.ranks();
  out["devices"] = blueprint.problem.devices;
  out["stage"] = blueprint.problem.stage;
  out["micro_batch"] = blueprint.shape.sequences;
  out["accumulation"] = blueprint.micro_batches;
  out["tokens_per_step"] = blueprint.problem.tokens_per_step();
  out["placement"] = placement_json(blueprint.placement);
  const step::Options& options = blueprint.options;
  out["buffers"] = Json::object({{"weights", options.buffers.weight_staging},
                                 {"states", options.buffers.state_staging},
                                 {"activations", options.buffers.activation_staging},
                                 {"gradients", options.buffers.gradient_staging},
                                 {"device_weights", options.buffers.weight_slots},
                                 {"device_gradients", options.buffers.gradient_slots}});
  if (prediction == nullptr) return out;
  out["lanes"] = lanes_json(*prediction, blueprint.problem.devices);
  out["bounds"] = bounds_json(*prediction);
  add_bottleneck(*prediction, out);
  return out;
}

}  // namespace ballast::planner
