#include "ballast/plan/rates.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include <fmt/format.h>

#include "ballast/core/error.h"

namespace ballast::plan {

double rate_at(const Curve& curve, double tokens) {
  if (curve.empty()) throw Error(ErrorCategory::config, "rates: a curve has no points");
  const auto right = std::find_if(curve.begin(), curve.end(),
                                  [&](const CurvePoint& point) { return point.tokens >= tokens; });
  if (right == curve.end()) return curve.back().flops_per_second;
  if (right == curve.begin() || right->tokens == tokens) return right->flops_per_second;
  const CurvePoint& left = *(right - 1);
  const double position = std::log(tokens / left.tokens) / std::log(right->tokens / left.tokens);
  const double seconds =
      (1.0 - position) / left.flops_per_second + position / right->flops_per_second;
  return 1.0 / seconds;
}

void complete(Rates& rates) {
  if (rates.measured_at > 0.0) return;
  // The kernels of the host device are equally fast for all heads.
  const bool host = rates.shared_cores > 0;
  for (const AttentionClassInfo& info : kAttentionClasses) {
    AttentionRate& rate = rates.of(info.id);
    const AttentionRate& like = rates.of(info.substitute);
    const auto fill = [&](double& own, double substitute, double share) {
      if (own > 0.0 || !(substitute > 0.0)) return;
      own = (host ? 1.0 : share) * substitute;
      rate.assumed = true;
    };
    fill(rate.forward, like.forward, info.forward);
    fill(rate.backward, like.backward, info.backward);
  }
  if (host || rates.adapter_per_second > 0.0 || !(rates.device_memory_per_second > 0.0)) return;
  rates.adapter_per_second = kAdapterShare * rates.device_memory_per_second;
  rates.adapters_assumed = true;
}

namespace {

[[noreturn]] void refuse(const Rates& rates, std::string_view key, std::string_view reason) {
  throw MissingRate(ErrorCategory::config,
                    fmt::format("rates '{}': {} is missing, but {}", rates.name, key, reason));
}

/// A rate and its key in a rates file.
struct Rate {
  double per_second;
  std::string_view key;
  std::string_view reason;  ///< reason why a plan needs it
};

double seconds_for(double amount, const Rate& rate, const Rates& rates) {
  if (amount == 0.0) return 0.0;
  if (!(rate.per_second > 0.0)) refuse(rates, rate.key, rate.reason);
  return amount / rate.per_second;
}

Rate fabric_of(const Rates& rates) {
  return {rates.fabric_per_second, "fabric_gbps",
          "the ranks of a node exchange weights or gradients"};
}
/// `sharing`: exchanges at the same time.
Rate network_of(const Rates& rates, double sharing) {
  return {rates.network_per_second / sharing, "network_gbps",
          "ranks of several nodes exchange weights or gradients"};
}

/// Returns whether ranks of several nodes take part. Ranks that share tiles are neighbours, and so
/// are groups of them that share one copy of split weights.
bool leaves_node(const Operation& operation, const Schedule& schedule, const Rates& rates) {
  if (schedule.ranks * schedule.tensor <= rates.ranks_per_node) return false;
  switch (operation.group) {
    case RankGroup::tensor:
      return rates.ranks_per_node % schedule.tensor != 0;
    case RankGroup::weight_copy:
      return rates.ranks_per_node % (schedule.ranks_in_group * schedule.tensor) != 0;
    case RankGroup::all:
    case RankGroup::same_share:
      break;
  }
  return true;
}

/// Returns the bytes per second that one rank receives. A collective over several nodes also
/// crosses the fabric of each node; the slower of the two bounds it. Ranks with other tiles do the
/// same at the same time, over the same network.
Rate between_ranks(const Operation& operation, const Schedule& schedule, const Rates& rates) {
  const Rate fabric = fabric_of(rates);
  if (!leaves_node(operation, schedule, rates)) return fabric;
  const double sharing = operation.group == RankGroup::tensor
                             ? 1.0
                             : std::min<double>(schedule.tensor, rates.ranks_per_node);
  const Rate network = network_of(rates, sharing);
  const bool fabric_counts = rates.ranks_per_node > 1;
  return fabric_counts && fabric.per_second < network.per_second ? fabric : network;
}

/// If the rates do not name its speed, a copy passes through host memory over the links of both
/// devices.
Rate between_devices(const Rates& rates) {
  const bool given = rates.peer_per_second > 0.0;
  return {
      given ? rates.peer_per_second : std::min(rates.upload_per_second, rates.offload_per_second),
      "peer_gbps", "the plan copies between devices"};
}

Rate of_bytes(const Operation& operation, const Schedule& schedule, const Rates& rates) {
  switch (operation.lane) {
    case Lane::upload:
      return {rates.upload_per_second, "upload_gbps", "the plan copies from host to device"};
    case Lane::offload:
      return {rates.offload_per_second, "offload_gbps", "the plan copies from device to host"};
    case Lane::fetch:
      return {rates.read_per_second, "read_gbps", "the plan fetches from NVMe"};
    case Lane::writeback:
      return {rates.write_per_second, "write_gbps", "the plan writes to NVMe"};
    case Lane::peer:
      return between_devices(rates);
    default:
      return between_ranks(operation, schedule, rates);
  }
}

Rate of_traffic(const Operation& operation, const Rates& rates) {
  // The host device updates with the same code and threads.
  const bool same = rates.shared_cores > 0 && rates.update_per_second > 0.0 &&
                    operation.action == Action::update_on_device;
  if (operation.lane == Lane::update || same) {
    return {rates.update_per_second, "update_gbps", "the plan updates on the host"};
  }
  return {rates.device_memory_per_second, "device_memory_gbps",
          "the plan clears, packs, copies, encodes or updates on the device"};
}

Rate of_flops(const Operation& operation, const Schedule& schedule, const Rates& rates) {
  const auto at = [&](const Curve& curve) {
    const double tokens = static_cast<double>(operation.token_share) *
                          static_cast<double>(schedule.micro_batch_tokens);
    return curve.empty() ? 0.0 : rate_at(curve, tokens);
  };
  switch (operation.speed) {
    case Speed::head:
      return {at(rates.head), "head", "the plan computes a loss"};
    case Speed::backward:
      return {at(rates.backward), "backward", "the plan computes gradients"};
    case Speed::forward:
      break;
  }
  return {at(rates.forward), "forward", "the plan computes layers"};
}

/// Seconds of all matrix products. Attention has its own rates, if they are given.
double seconds_of_products(const Operation& operation, const Schedule& schedule,
                           const Rates& rates) {
  double flops = operation.flops;
  double seconds = 0.0;
  const auto attend = [&](double part, double products, double per_second) {
    if (!(per_second > 0.0)) return;
    flops -= part;
    seconds += products * part / per_second;
  };
  const AttentionRate& rate = rates.of(operation.attention);
  attend(operation.attention_flops, 1.0, rate.forward);
  attend(operation.attention_backward_flops, info_of(operation.attention).backward_products,
         rate.backward);
  if (!(flops > 0.0)) return seconds;
  return seconds + seconds_for(flops, of_flops(operation, schedule, rates), rates);
}

bool uses(const Schedule& schedule, Lane lane) {
  const auto on_lane = [lane](const Operation& operation) { return operation.lane == lane; };
  const auto in = [&](const Plan& plan) {
    return std::any_of(plan.operations.begin(), plan.operations.end(), on_lane);
  };
  return in(schedule.first) || in(schedule.steady);
}

}  // namespace

void require_exchange_rates(const Rates& rates, std::uint64_t ranks) {
  if (ranks <= 1) return;
  const auto require = [&rates](const Rate& rate) {
    if (!(rate.per_second > 0.0)) refuse(rates, rate.key, rate.reason);
  };
  if (rates.ranks_per_node > 1) require(fabric_of(rates));
  if (ranks > rates.ranks_per_node) require(network_of(rates, 1.0));
}

Cost cost_of(const Operation& operation, const Schedule& schedule, const Rates& rates) {
  Cost cost;
  cost.lead = rates.launch_seconds;
  if (operation.lane == Lane::fetch || operation.lane == Lane::writeback) {
    cost.lead += rates.io_latency_seconds;
  }
  if (operation.bytes > 0) {
    cost.work += seconds_for(static_cast<double>(operation.bytes),
                             of_bytes(operation, schedule, rates), rates);
  }
  if (operation.flops > 0.0) {
    cost.work += seconds_of_products(operation, schedule, rates);
  }
  if (operation.traffic > 0) {
    cost.work +=
        seconds_for(static_cast<double>(operation.traffic), of_traffic(operation, rates), rates);
  }
  if (rates.adapter_per_second > 0.0) {
    cost.work += static_cast<double>(operation.adapter_traffic) / rates.adapter_per_second;
  }
  cost.work *= static_cast<double>(operation.likelihood);
  return cost;
}

void check_sharing(const Schedule& schedule, const Rates& rates) {
  const bool mixed = uses(schedule, Lane::fetch) && uses(schedule, Lane::writeback);
  if (mixed && !(rates.mixed_per_second > 0.0)) {
    refuse(rates, "mixed_gbps", "the plan reads from and writes to NVMe at once");
  }
  if (mixed && !(rates.mixed_read_share > 0.0 && rates.mixed_read_share < 1.0)) {
    throw Error(ErrorCategory::config,
                fmt::format("rates '{}': mixed_read_share must be above 0 and below 1, got {}",
                            rates.name, rates.mixed_read_share));
  }
  if (rates.shared_cores == 0) return;
  if (rates.compute_threads == 0) refuse(rates, "compute_threads", "shared_cores is given");
  if (rates.update_threads == 0 && uses(schedule, Lane::update)) {
    refuse(rates, "update_threads", "shared_cores is given");
  }
}

}  // namespace ballast::plan
