// Used if the program is built without cuDNN's headers.
#include "ballast/core/error.h"

#include "src/model/cuda/attention/attention.h"

namespace ballast::model::cuda {

struct FusedAttention::Plan {};

FusedAttention::FusedAttention(const AttentionShape&) {
  throw Error(ErrorCategory::device, std::string(fused_attention_refusal()));
}
FusedAttention::~FusedAttention() = default;

void FusedAttention::forward(cudaStream_t, const Bf16*, Bf16*, float*, void*) {}

std::string_view fused_attention_refusal() {
  return "this program was built without cuDNN 9";
}

std::string_view fused_attention_file() {
  return "";
}

std::string fused_attention_version() {
  return "";
}

}  // namespace ballast::model::cuda
