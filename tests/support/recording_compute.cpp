#include "tests/support/recording_compute.h"

#include "ballast/core/error.h"

#include "src/model/compute/factories.h"
#include "tests/support/recording_ops.h"

namespace ballast::test {

std::unique_ptr<model::Compute> make_recording_compute(const model::Architecture& model, DType type,
                                                       model::MicroBatchShape shape,
                                                       const RecordedMlp& mlp, CallLog& log) {
  const model::MlpRule rule = {.bytes = mlp.bytes, .joins_gate_and_up = mlp.joins_gate_and_up};
  if (type == DType::f32) {
    return model::make_device_compute(model, shape, recording_ops<float>(log, rule));
  }
  expects(type == DType::bf16, "calls are recorded in f32 and bf16");
  return model::make_device_compute(model, shape, recording_ops<Bf16>(log, rule));
}

}  // namespace ballast::test
