#include <cstddef>
#include <cstdint>
#include <memory>

#include "src/model/cuda/ops.h"
#include "src/model/cuda/tokens/tokens.h"
#include "src/model/cuda/work_check.h"

namespace ballast::model::cuda {
namespace {

template <class T>
class CudaTokens final : public TokenOps<T>, OnStream {
 public:
  explicit CudaTokens(const State& state) : OnStream(state) {}

  void check_tokens(const std::int32_t* tokens, std::int32_t least) override {
    token_check_.set_memory(state_->first_bad);
    token_check_.enqueue(state_->stream(), tokens, extents_.shape.tokens(), least,
                         extents_.vocabulary);
  }
  void embed(const Embedding<const T>& tables, const Ids& ids, T* out) override {
    check(cuda::embed(queue(), tables, ids, embedding_extents(), out), "embedding",
          {extents_.shape.tokens(), extents_.hidden});
  }
  [[nodiscard]] std::size_t embedding_scratch_bytes() const override {
    return 2 * extents_.shape.tokens() * sizeof(std::uint32_t);
  }
  void embed_backward(const Ids& ids, const T* dy, const Embedding<float>& gradients,
                      std::byte* scratch) override {
    check(cuda::embed_backward(queue(), ids, dy, embedding_extents(), gradients,
                               reinterpret_cast<std::uint32_t*>(scratch)),
          "gradient of the embedding", {extents_.shape.tokens(), extents_.hidden});
  }

 private:
  [[nodiscard]] EmbeddingExtents embedding_extents() const {
    return {extents_.shape.tokens(), extents_.shape.whole_length(), extents_.hidden};
  }
  TokenCheck token_check_;
};

template <class T>
class CudaLosses final : public LossOps<T>, OnStream {
 public:
  explicit CudaLosses(const State& state) : OnStream(state) {}

  void cap_logits(const LogitTile& tile) override {
    check(cuda::cap_logits(queue(), tile), "soft cap of the logits", {tile.rows, tile.width});
  }
  void sum_logits(const LogitTile& tile, const std::int32_t* targets, bool first,
                  RowSum<float>* sums) override {
    check(cuda::sum_logits(queue(), tile, targets, first, sums), "sums of the logits",
          {tile.rows, tile.width});
  }
  void merge_row_sums(const RowSumsOfTiles& tiles, RowSum<float>* sums) override {
    check(cuda::merge_row_sums(queue(), tiles, sums), "sums of the vocabulary tiles", {tiles.rows});
  }
  void logit_gradients(const LogitTile& tile, const std::int32_t* targets, float scale,
                       const float* weights, const RowSum<float>* sums) override {
    check(cuda::logit_gradients<T>(queue(), tile, targets, scale, weights, sums),
          "gradients of the logits", {tile.rows, tile.width});
  }
  void row_losses(const RowSum<float>* sums, const std::int32_t* targets, std::size_t rows,
                  double* losses) override {
    check(cuda::row_losses(queue(), sums, targets, rows, losses), "losses of the rows", {rows});
  }
  void sum_losses(const double* losses, std::size_t count, std::size_t parts,
                  double* sums) override {
    check(cuda::sum_losses(queue(), losses, count, parts, sums), "sum of the losses", {count});
  }
  void dpo_loss(const PairRows& rows, const Preference& how, PairResult* results) override {
    check(cuda::dpo_loss(queue(), rows, how, results), "losses of the pairs",
          {rows.pairs, rows.length});
  }
};

}  // namespace

template <class T>
void add_token_ops(const State& state, DeviceOps<T>& to) {
  to.tokens = std::make_shared<CudaTokens<T>>(state);
  to.losses = std::make_shared<CudaLosses<T>>(state);
}

template void add_token_ops(const State&, DeviceOps<float>&);
template void add_token_ops(const State&, DeviceOps<Bf16>&);
template void add_token_ops(const State&, DeviceOps<F16>&);

}  // namespace ballast::model::cuda
