#include <memory>
#include <span>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/dtype.h"
#include "ballast/core/error.h"
#include "ballast/core/random.h"
#include "ballast/device/cuda_stream.h"
#include "ballast/model/attention.h"

#include "src/device/cuda/errors.h"
#include "src/model/cuda/attention/attention.h"
#include "src/model/cuda/cudnn/fused_attention.h"

namespace ballast::model {
namespace {

void require_kernels(const AttentionShape& s) {
  const bool counted = s.sequences > 0 && s.length > 0 && s.heads > 0 && s.kv_heads > 0;
  const bool sized = s.head_dim > 0 && s.head_dim % 8 == 0 && s.head_dim <= cuda::kWidestHead;
  if (counted && sized && s.heads % s.kv_heads == 0) return;
  throw Error(ErrorCategory::usage,
              fmt::format("attention needs head_dim to be a multiple of 8 up to {} and kv_heads to "
                          "divide heads",
                          cuda::kWidestHead));
}

class CudaAttentionTrial final : public AttentionTrial {
 public:
  CudaAttentionTrial(device::Device& device, const AttentionShape& shape)
      : device_(device), shape_(shape), stream_(device.make_stream("attention")) {
    const std::size_t results = shape_.tokens() * shape_.width();
    qkv_ = random(shape_.tokens() * shape_.row(), 1);
    gradient_ = random(results, 2);
    out_ = values(results);
    dqkv_ = values(shape_.tokens() * shape_.row());
    log_sums_ = view_as<float>(device.allocate(shape_.log_sums() * sizeof(float), "sums")).raw();
    scratch_ =
        device.allocate(cuda::attention_scratch_bytes(shape_, sizeof(Bf16)), "scratch").raw();
    workspace_ = device.allocate(cuda::FusedAttention::kWorkspace, "workspace").raw();
    static_cast<void>(native());  // selects the device for the plan
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
      expects(fused_ != nullptr, "cuDNN attention is not available");
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
  /// Random numbers, uniform between -1 and 1.
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

Bytes attention_trial_bytes(const AttentionShape& shape) {
  require_kernels(shape);
  const Bytes values = 2 * shape.tokens() * (shape.row() + shape.width()) * sizeof(Bf16);
  const Bytes others = shape.log_sums() * sizeof(float) +
                       cuda::attention_scratch_bytes(shape, sizeof(Bf16)) +
                       cuda::FusedAttention::kWorkspace;
  return values + others + 7 * kPage;  // seven allocations, each rounded up
}

std::unique_ptr<AttentionTrial> make_attention_trial(device::Device& device,
                                                     const AttentionShape& shape) {
  require_kernels(shape);
  return std::make_unique<CudaAttentionTrial>(device, shape);
}

}  // namespace ballast::model
