#include "src/model/cuda/cudnn/engine_plan.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"

namespace ballast::model::cuda {
namespace {

/// Fills `others`, which are of that type, with what cuDNN has there; returns how many there were.
std::size_t fill(const CudnnCalls& calls, const Descriptor& from, cudnnBackendAttributeName_t name,
                 std::span<const Descriptor> others) {
  std::vector<cudnnBackendDescriptor_t> raw;
  for (const Descriptor& other : others) raw.push_back(other.get());
  return calls.fill(from, name, raw);
}

bool always_same_bits(const CudnnCalls& calls, const Descriptor& configuration) {
  const Descriptor engine = calls.make(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  fill(calls, configuration, CUDNN_ATTR_ENGINECFG_ENGINE, {&engine, 1});
  std::array<cudnnBackendNumericalNote_t, CUDNN_NUMERICAL_NOTE_TYPE_COUNT> notes = {};
  const std::size_t count = calls.get(engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
                                      std::span<cudnnBackendNumericalNote_t>(notes));
  const std::span noted = std::span(notes).first(std::min(count, notes.size()));
  return std::find(noted.begin(), noted.end(), CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) ==
         noted.end();
}

EnginePlan plan_of(const CudnnCalls& calls, cudnnHandle_t handle, Descriptor configuration) {
  Descriptor plan = calls.make(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
  calls.set(plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, handle);
  calls.link(plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configuration.get());
  calls.finish(plan, "a plan");
  std::int64_t workspace = 0;
  calls.get(plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, std::span(&workspace, 1));
  return {std::move(configuration), std::move(plan), static_cast<std::size_t>(workspace)};
}

/// One engine after the other, as the heuristics list them, and why the first one that was tried
/// will not do.
class Search {
 public:
  Search(const CudnnCalls& calls, cudnnHandle_t handle, std::size_t most_workspace)
      : calls_(calls), handle_(handle), most_workspace_(most_workspace) {}

  /// Empty where none of those that `mode` finds will do.
  EnginePlan among(const Descriptor& graph, cudnnBackendHeurMode_t mode) {
    Descriptor heuristics = calls_.make(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    calls_.link(heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph.get());
    calls_.set(heuristics, CUDNN_ATTR_ENGINEHEUR_MODE, mode);
    calls_.finish(heuristics, "the search for engines");
    const std::size_t most = calls_.fill(heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS, {});
    if (most == 0) return {};
    std::vector<Descriptor> found(most);
    for (Descriptor& one : found) one = calls_.make(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    // Those that cannot run on this machine are not among them.
    const std::size_t count = fill(calls_, heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS, found);
    for (std::size_t i = 0; i < std::min(count, most); ++i) {
      if (EnginePlan plan = try_one(std::move(found[i])); plan.plan != nullptr) return plan;
    }
    return {};
  }

  [[nodiscard]] const std::string& reason() const { return reason_; }
  void refuse(const std::string& reason) {
    if (reason_.empty()) reason_ = reason;
  }

 private:
  EnginePlan try_one(Descriptor configuration) {
    try {
      if (!always_same_bits(calls_, configuration)) {
        refuse("cuDNN: the results of its engine are not the same each time");
        return {};
      }
      EnginePlan plan = plan_of(calls_, handle_, std::move(configuration));
      if (plan.workspace <= most_workspace_) return plan;
      refuse(fmt::format("cuDNN: its engine needs {} bytes of workspace, and there are {}",
                         plan.workspace, most_workspace_));
    } catch (const Error& error) {
      refuse(error.what());
    }
    return {};
  }

  const CudnnCalls& calls_;
  cudnnHandle_t handle_;
  std::size_t most_workspace_;
  std::string reason_;
};

}  // namespace

EnginePlan plan_graph(const CudnnCalls& calls, cudnnHandle_t handle, const Descriptor& graph,
                      std::size_t most_workspace) {
  Search search(calls, handle, most_workspace);
  for (const cudnnBackendHeurMode_t mode : {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK}) {
    try {
      if (EnginePlan plan = search.among(graph, mode); plan.plan != nullptr) return plan;
    } catch (const Error& error) {
      search.refuse(error.what());
    }
  }
  search.refuse("cuDNN has no engine for it on this GPU");
  throw Error(ErrorCategory::device, search.reason());
}

}  // namespace ballast::model::cuda
