// The devices of a rank: pipeline.stages and ballast.devices.

#include <fmt/format.h>

#include "src/config/json_values.h"
#include "src/config/sections.h"

namespace ballast::config {
namespace {

constexpr std::string_view kStages = "pipeline.stages";

}  // namespace

Section pipeline_keys(PipelineSection& pipeline, std::vector<std::string>& log) {
  return with_deepspeed_keys(
      {row(kPlanOnly,
           also_called(
               or_auto(whole("stages", pipeline.stages, {1, kMostStages}), pipeline.stages),
               {"stage", "pp_size", "pp", "num_stages", "pipeline_stages", "pipeline_parallel_size",
                "pipeline_parallel_degree", "pipeline_model_parallel_size"}),
           {"number of devices of each rank, to which the layers are dealt in turn, see "
            "[below](#several-devices). Same bits",
            "1, or the number of `ballast.devices`", "1 to 8, `\"auto\"`"})},
      "pipeline", log);
}

Key devices_key(std::vector<std::uint32_t>& devices) {
  constexpr WholeRange kNumbers = {0, 1023};
  const auto read = [&devices, kNumbers](const Value& value) {
    devices.clear();
    if (value.is_auto()) return;
    const auto numbers = value.elements("\"auto\" or an array of GPU numbers such as [0, 1]");
    if (numbers.empty() || numbers.size() > kMostStages) {
      value.fail(fmt::format("must have 1 to {} numbers, got {}", kMostStages, numbers.size()));
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
