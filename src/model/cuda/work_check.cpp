#include "src/model/cuda/work_check.h"

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "ballast/core/error.h"

#include "src/device/cuda/runtime.h"
#include "src/model/cuda/tokens/tokens.h"

namespace ballast::model::cuda {

void check_work(cudaError_t code, std::string_view what, ShapeOfWork shape,
                device::Stream& stream) {
  std::string name(what);
  for (std::size_t i = 0; i < shape.size(); ++i) {
    name += (i == 0 ? " [" : ", ") + std::to_string(shape[i]);
  }
  name += ']';
  device::check_cuda(code, name);
  try {
    stream.synchronize();
  } catch (const Error& error) {
    throw error.with_context(name);
  }
}

namespace {

using device::check_cuda;

constexpr std::uint32_t kNone = 0xffffffffU;
constexpr std::string_view kWhat = "checking tokens";

std::int32_t read_token(const std::int32_t* token, cudaStream_t queue) {
  std::int32_t value = 0;
  check_cuda(cudaMemcpyAsync(&value, token, sizeof value, cudaMemcpyDeviceToHost, queue), kWhat);
  check_cuda(cudaStreamSynchronize(queue), kWhat);
  return value;
}

}  // namespace

/// Pinned words for results: one per check in flight.
class TokenCheck::Words : public std::enable_shared_from_this<Words> {
 public:
  /// Returns a word for one caller, which is reused after the last copy of the pointer ends.
  std::shared_ptr<std::uint32_t> take() {
    const std::scoped_lock lock(mutex_);
    if (free_.empty()) allocate();
    std::uint32_t* const word = free_.back();
    free_.pop_back();
    return {word, [words = shared_from_this()](std::uint32_t* used) {
              const std::scoped_lock lock(words->mutex_);
              words->free_.push_back(used);
            }};
  }

 private:
  using Block = std::unique_ptr<std::uint32_t, device::CudaEnd<cudaFreeHost>>;

  void allocate() {
    void* made = nullptr;
    check_cuda(cudaMallocHost(&made, kMaxChecks * sizeof(std::uint32_t)), kWhat);
    Block block(static_cast<std::uint32_t*>(made));
    free_.reserve((blocks_.size() + 1) * kMaxChecks);  // so that returning a word cannot fail
    for (std::size_t i = 0; i < kMaxChecks; ++i) free_.push_back(block.get() + i);
    blocks_.push_back(std::move(block));
  }

  std::mutex mutex_;
  std::vector<Block> blocks_;
  std::vector<std::uint32_t*> free_;
};

TokenCheck::TokenCheck() : words_(std::make_shared<Words>()) {}

void TokenCheck::enqueue(device::CudaStream& stream, const std::int32_t* tokens, std::size_t count,
                         std::int32_t least, std::size_t vocabulary) {
  const cudaStream_t queue = stream.native();
  const auto found = words_->take();
  check_cuda(cudaMemsetAsync(first_bad_, 0xff, sizeof kNone, queue), kWhat);
  check_cuda(check_tokens(queue, tokens, count, least, vocabulary, first_bad_), kWhat);
  check_cuda(cudaMemcpyAsync(found.get(), first_bad_, sizeof kNone, cudaMemcpyDeviceToHost, queue),
             kWhat);
  stream.add_verdict([found, tokens, queue, vocabulary] {
    if (*found == kNone) return;
    throw Error(ErrorCategory::data,
                fmt::format("token {} of the micro-batch is {}, but model.vocab_size is {}", *found,
                            read_token(tokens + *found, queue), vocabulary));
  });
}

}  // namespace ballast::model::cuda
