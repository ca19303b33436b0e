#include <memory>

#include "ballast/device/host_stream.h"

#include "src/model/compute/compute_by.h"
#include "src/model/host/factories.h"
#include "src/model/host/ops.h"
#include "src/model/host/team.h"

namespace ballast::model::host {
namespace {

/// Number of kernel threads for `device`'s streams.
std::size_t threads_of(device::Device& device) {
  std::size_t threads = 1;
  const auto stream = device.make_stream("threads");
  device::as_host(*stream).enqueue([&] { threads = team_size(); });
  stream->synchronize();
  return threads;
}

}  // namespace

std::unique_ptr<Compute> make_host_compute(const Architecture& model, DType type,
                                           MicroBatchShape shape, std::size_t threads,
                                           const MlpRule& mlp_rule) {
  return with_training_type(type, [&](auto value) -> std::unique_ptr<Compute> {
    return std::make_unique<ComputeBy<Ops<decltype(value)>>>(model, shape, threads, mlp_rule);
  });
}

std::unique_ptr<Compute> make_host_compute(device::Device& device, const Architecture& model,
                                           DType type, MicroBatchShape shape) {
  return make_host_compute(model, type, shape, threads_of(device));
}

}  // namespace ballast::model::host
