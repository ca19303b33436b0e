#include "tools/bench/step_times.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/clocks.h"
#include "ballast/step/labels.h"

namespace ballast::tools {

namespace {

using RowKey = std::pair<KernelGroup, std::array<std::size_t, 3>>;

RowKey key_of(const KernelSpan& span) {
  return {span.group, span.extents};
}

KernelRow empty_row(const KernelSpan& span) {
  KernelRow row;
  row.group = to_string(span.group);
  row.name = row.group;
  if (span.group == KernelGroup::pass) row.name = "passes outside kernels";
  if (span.group == KernelGroup::product) {
    const auto [m, n, k] = span.extents;
    row.name = fmt::format("{} x {} x {}", m, n, k);
  }
  return row;
}

double seconds_between(KernelTime start, KernelTime end) {
  return std::chrono::duration<double>(end - start).count();
}

}  // namespace

std::vector<KernelRow> break_down(const std::vector<KernelSpan>& spans, KernelTime start,
                                  KernelTime end) {
  struct Change {
    KernelTime at;
    bool begins;
    std::size_t span;
  };
  std::vector<Change> changes;
  std::map<RowKey, KernelRow> rows;
  for (std::size_t i = 0; i < spans.size(); ++i) {
    const KernelSpan& span = spans[i];
    if (span.end <= start || span.start >= end) continue;
    KernelRow& row = rows.try_emplace(key_of(span), empty_row(span)).first->second;
    const auto [m, n, k] = span.extents;
    row.calls += 1;
    row.flops += 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
    if (span.start == span.end) continue;
    changes.push_back({std::max(span.start, start), true, i});
    changes.push_back({std::min(span.end, end), false, i});
  }
  std::sort(changes.begin(), changes.end(),
            [](const Change& a, const Change& b) { return a.at < b.at; });
  KernelRow rest = {.name = "rest", .group = "rest"};
  // Running spans, in the order of their claim to the time. Spans of one thread that start in the
  // same instant contain each other, and the inner one ends first.
  using Claim = std::tuple<bool, KernelTime, KernelTime::duration, std::size_t>;
  const auto claim = [&](std::size_t i) {
    return Claim(spans[i].group != KernelGroup::update, spans[i].start,
                 -spans[i].end.time_since_epoch(), i);
  };
  std::set<Claim> running;
  KernelTime before = start;
  for (const Change& change : changes) {
    KernelRow& row =
        running.empty() ? rest : rows.at(key_of(spans[std::get<std::size_t>(*running.rbegin())]));
    row.seconds += seconds_between(before, change.at);
    before = change.at;
    if (change.begins) {
      running.insert(claim(change.span));
    } else {
      running.erase(claim(change.span));
    }
  }
  rest.seconds += seconds_between(before, end);
  std::vector<KernelRow> sorted;
  sorted.reserve(rows.size() + 1);
  for (auto& [key, row] : rows) sorted.push_back(std::move(row));
  std::stable_sort(sorted.begin(), sorted.end(), [](const KernelRow& a, const KernelRow& b) {
    return std::pair(a.flops > 0.0, a.seconds) > std::pair(b.flops > 0.0, b.seconds);
  });
  sorted.push_back(std::move(rest));
  return sorted;
}

namespace {

/// Times all operations of `timeline` that compute the same products as the first operation of
/// `plan` with that kernel on `block`.
TimedPass time_pass(const plan::Timeline& timeline, const plan::Plan& plan, model::Kernel kernel,
                    std::uint32_t block) {
  const auto first = std::find_if(
      plan.operations.begin(), plan.operations.end(), [&](const plan::Operation& operation) {
        return step::runs(operation, kernel) && operation.block == block;
      });
  if (first == plan.operations.end()) return {};
  std::vector<double> seconds;
  for (const plan::Span& span : timeline.spans) {
    const plan::Operation& operation = span.operation();
    if (!step::runs(operation, kernel) || operation.flops != first->flops) continue;
    seconds.push_back(span.end - span.start);
  }
  TimedPass pass;
  pass.count = seconds.size();
  pass.seconds = quantile(seconds, 0.5);
  pass.flops = first->flops;
  return pass;
}

/// Returns the first layer of each number of products.
std::vector<std::uint32_t> kinds_of_layers(const engine::Blueprint& blueprint) {
  std::vector<std::uint32_t> kinds;
  std::vector<double> flops;
  for (std::uint32_t b = 0; b < blueprint.model.blocks.size(); ++b) {
    if (blueprint.model.blocks[b].kind != model::BlockKind::layer) continue;
    const double own =
        blueprint.model.forward_flops(b, blueprint.shape.sequences, blueprint.shape.length);
    if (std::find(flops.begin(), flops.end(), own) != flops.end()) continue;
    flops.push_back(own);
    kinds.push_back(b);
  }
  return kinds;
}

}  // namespace

double model_flops_of_step(const engine::Blueprint& blueprint) {
  double forward = 0.0;
  for (std::size_t b = 0; b < blueprint.model.blocks.size(); ++b) {
    forward += blueprint.model.forward_flops(b, blueprint.shape.sequences, blueprint.shape.length);
  }
  return 3.0 * static_cast<double>(blueprint.micro_batches) * forward;
}

std::vector<TimedPass> time_passes(const plan::Timeline& timeline,
                                   const engine::Blueprint& blueprint) {
  const auto& program = blueprint.problem.program();
  std::vector<TimedPass> passes;
  const auto add = [&](std::string name, std::string_view key, model::Kernel kernel,
                       std::uint32_t block) {
    TimedPass pass = time_pass(timeline, blueprint.schedule.steady, kernel, block);
    if (pass.count == 0) return;
    pass.name = std::move(name);
    pass.key = key;
    pass.block = blueprint.model.blocks[block].name;
    passes.push_back(std::move(pass));
  };
  const std::vector<std::uint32_t> kinds = kinds_of_layers(blueprint);
  for (const std::uint32_t layer : kinds) {
    const std::string name = kinds.size() == 1 ? "layer" : blueprint.model.blocks[layer].name;
    add(name + " forward", "layer_forward", model::Kernel::layer, layer);
    add(name + " backward", "layer_backward", model::Kernel::layer_backward, layer);
  }
  add("head fwd + bwd", "head", model::Kernel::head_train, program.head);
  return passes;
}

}  // namespace ballast::tools
