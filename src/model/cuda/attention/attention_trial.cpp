#include "ballast/model/attention_trial.h"

#include <memory>
#include <span>
#include <vector>

#include "ballast/core/dtype.h"
#include "ballast/core/error.h"
#include "ballast/core/random.h"
#include "ballast/device/cuda_stream.h"

#include "src/device/cuda/errors.h"
#include "src/model/attention_shape.h"
#include "src/model/cuda/attention/attention.h"
#include "src/model/cuda/cudnn/fused_attention.h"

namespace ballast::model {
namespace {

AttentionShape shape_of(const AttentionExtents& e) {
  return {e.sequences, e.length, e.heads, e.kv_heads, e.head_size};
}

void require_extents(const AttentionExtents& e) {
  const bool counted = e.sequences > 0 && e.length > 0 && e.heads > 0 && e.kv_heads > 0;
  const bool sized = e.head_size > 0 && e.head_size % 8 == 0 && e.head_size <= 256;
  if (counted && sized && e.heads % e.kv_heads == 0) return;
  throw Error(
      ErrorCategory::usage,
      "attention needs heads of a multiple of 8 values, at most 256, and heads of keys whose "
      "number divides that of the others");
}

class CudaAttentionTrial final : public AttentionTrial {
 public:
  CudaAttentionTrial(device::Device& device, const AttentionExtents& extents)
      : device_(device), shape_(shape_of(extents)), stream_(device.make_stream("attention")) {
    const std::size_t results = shape_.tokens() * shape_.hidden();
    qkv_ = random(shape_.tokens() * shape_.row(), 1);
    gradient_ = random(results, 2);
    out_ = values(results);
    dqkv_ = values(shape_.tokens() * shape_.row());
    log_sums_ = view_as<float>(device.allocate(shape_.log_sums() * sizeof(float), "sums")).raw();
    scratch_ =
        device.allocate(cuda::attention_scratch_bytes(shape_, sizeof(Bf16)), "scratch").raw();
    workspace_ = device.allocate(cuda::FusedAttention::kWorkspace, "workspace").raw();
    static_cast<void>(native());  // takes the device for what is planned
    try {
      fused_ = std::make_unique<cuda::FusedAttention>(shape_);
    } catch (const Error& error) {
      cudnn_refusal_ = error.what();
    }
  }

  std::string cudnn_refusal() const override { return cudnn_refusal_; }

  void run(AttentionPass pass, std::size_t count) override {
    for (std::size_t i = 0; i < count; ++i) enqueue(pass);
    stream_->synchronize();
  }

 private:
  [[nodiscard]] cudaStream_t native() const { return device::as_cuda(*stream_).native(); }

  void enqueue(AttentionPass pass) {
    if (pass == AttentionPass::cudnn_forward) {
      expects(fused_ != nullptr, "attention by cuDNN, which is not there");
      return fused_->forward(native(), qkv_, out_, log_sums_, workspace_);
    }
    if (pass == AttentionPass::own_forward) {
      return device::check_cuda(cuda::attention<Bf16>(native(), shape_, qkv_, out_, log_sums_),
                                "attention");
    }
    device::check_cuda(cuda::attention_backward<Bf16>(native(), shape_, qkv_, out_, log_sums_,
                                                      gradient_, dqkv_, scratch_),
                       "gradient of attention");
  }

  Bf16* values(std::size_t count) {
    return view_as<Bf16>(device_.allocate(count * sizeof(Bf16), "attention")).raw();
  }
  /// Uniform between -1 and 1.
  Bf16* random(std::size_t count, std::uint64_t seed) {
    std::vector<Bf16> made(count);
    for (std::size_t i = 0; i < count; ++i) {
      made[i] =
          to_bf16(static_cast<float>(static_cast<std::int64_t>(random_u64(seed, i))) * 0x1p-63F);
    }
    const DeviceBytes bytes = device_.allocate(count * sizeof(Bf16), "attention");
    device_.copy_to_device(*stream_, bytes, std::as_bytes(std::span(made)));
    stream_->synchronize();
    return view_as<Bf16>(bytes).raw();
  }

  device::Device& device_;
  AttentionShape shape_;
  std::unique_ptr<device::Stream> stream_;
  Bf16* qkv_ = nullptr;
  Bf16* gradient_ = nullptr;
  Bf16* out_ = nullptr;
  Bf16* dqkv_ = nullptr;
  float* log_sums_ = nullptr;
  std::byte* scratch_ = nullptr;
  std::byte* workspace_ = nullptr;
  std::unique_ptr<cuda::FusedAttention> fused_;
  std::string cudnn_refusal_;
};

}  // namespace

Bytes attention_trial_bytes(const AttentionExtents& extents) {
  require_extents(extents);
  const AttentionShape shape = shape_of(extents);
  const Bytes values = 2 * shape.tokens() * (shape.row() + shape.hidden()) * sizeof(Bf16);
  const Bytes others = shape.log_sums() * sizeof(float) +
                       cuda::attention_scratch_bytes(shape, sizeof(Bf16)) +
                       cuda::FusedAttention::kWorkspace;
  return values + others + 7 * kPage;  // seven allocations, each rounded up
}

std::unique_ptr<AttentionTrial> make_attention_trial(device::Device& device,
                                                     const AttentionExtents& extents) {
  require_extents(extents);
  return std::make_unique<CudaAttentionTrial>(device, extents);
}

}  // namespace ballast::model
