#pragma once

#include <functional>
#include <span>
#include <utility>

#include "ballast/engine/engine.h"
#include "ballast/engine/run_states.h"

namespace ballast::test {

/// Initial weights computed by functions. With `read_bf16`, all tensors that are `bf16` have bf16
/// values.
class FunctionWeights : public engine::WeightSource {
 public:
  using Read = std::function<void(const model::TensorSpec&, Elems, std::span<float>)>;
  using IsBf16 = std::function<bool(const model::TensorSpec&)>;
  using ReadBf16 = std::function<void(const model::TensorSpec&, Elems, HostBytes)>;

  // NOLINTNEXTLINE(google-explicit-constructor): so that tests can pass functions in braces
  FunctionWeights(Read read, IsBf16 bf16 = nullptr, ReadBf16 read_bf16 = nullptr)
      : read_(std::move(read)), bf16_(std::move(bf16)), read_bf16_(std::move(read_bf16)) {}

  void read(const model::TensorSpec& tensor, Elems first, std::span<float> out) override {
    read_(tensor, first, out);
  }
  bool is_bf16(const model::TensorSpec& tensor) override { return bf16_ && bf16_(tensor); }
  void read_bf16(const model::TensorSpec& tensor, Elems first, HostBytes out) override {
    read_bf16_(tensor, first, out);
  }

 private:
  Read read_;
  IsBf16 bf16_;
  ReadBf16 read_bf16_;
};

inline void start_from(engine::Engine& engine, FunctionWeights weights) {
  engine.start(weights);
}

}  // namespace ballast::test
