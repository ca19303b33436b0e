#pragma once

#include <memory>

#include "ballast/core/dtype.h"
#include "ballast/model/compute.h"

#include "tests/support/call_log.h"

namespace ballast::test {

/// A device's choices that decide about the calls of an MLP.
struct RecordedMlp {
  Bytes bytes = Bytes{1} << 40U;   ///< MlpRule::bytes; the default cuts nothing
  bool joins_gate_and_up = false;  ///< MlpRule::joins_gate_and_up
};

/// Makes kernels that compute nothing and write the operations of each pass to `log`, which must
/// outlive them. They need no device: any stream will do, and memory is that of CallLog::region().
/// `type`: f32 or bf16.
std::unique_ptr<model::Compute> make_recording_compute(const model::Architecture& model, DType type,
                                                       model::MicroBatchShape shape,
                                                       const RecordedMlp& mlp, CallLog& log);

}  // namespace ballast::test
