#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/documents.h"
#include "tests/unit/model/fixture.h"

namespace ballast::test {

/// Results of a model's layers for two micro-batches, one after the other.
struct LayerResults {
  std::vector<double> out;
  std::vector<double> dx;
  std::map<std::string, std::vector<double>> gradients;  ///< gradients of whole tensors, by name
  friend bool operator==(const LayerResults&, const LayerResults&) = default;
};

/// Calls work(index in the tensor's part of the block, index in the whole tensor) for all elements.
template <class Work>
void for_elements(const model::TensorSpec& tensor, const Work& work) {
  for (Elems at = 0; at < tensor.size;) {
    const model::TensorRun run = model::run_in_files(tensor, at);
    const Elems count = std::min(run.count, tensor.size - at);
    for (Elems i = 0; i < count; ++i) work(at + i, run.first + i);
    at += count;
  }
}

inline Elems whole_size(const model::TensorSpec& tensor) {
  Elems size = 1;
  for (const std::uint64_t extent : tensor.whole_shape()) size *= extent;
  return size;
}

/// Flat weights of a block, which depend only on the names of its tensors and the places in the
/// whole tensors.
inline std::vector<double> weights_by_name(const model::BlockSpec& block) {
  std::vector<double> flat(block.elements, 0.0);
  for (const model::TensorSpec& tensor : block.tensors) {
    std::uint64_t seed = 1;
    for (const char c : tensor.name) seed = 31 * seed + static_cast<unsigned char>(c);
    const auto whole =
        normals(whole_size(tensor), seed, 0.2, tensor.init == model::Init::ones ? 1.0 : 0.0);
    for_elements(tensor, [&](Elems at, Elems in_all) { flat[tensor.offset + at] = whole[in_all]; });
  }
  return flat;
}

/// The layers of a model, in one piece or in tiles, forward and backward, with
/// weights_by_name().
class LayersRun {
 public:
  /// `before`: the content of all memory that a step need not have cleared.
  LayersRun(Bench b, bool packed, double before) : b_(std::move(b)), before_(before) {
    const model::KernelSizes& memory = b_.compute->sizes();
    if (packed) {
      positions_ = b_.upload_tokens(packed_positions(b_.shape.sequences, b_.shape.length));
    }
    rows_ = filled(memory.rows);
    b_.compute->set_workspace(filled(memory.workspace));
    sums_ =
        b_.gradient(std::vector<float>(memory.sums / sizeof(float), static_cast<float>(before)));
    for (const model::BlockSpec& block : b_.architecture.blocks) {
      if (block.kind == model::BlockKind::layer) {
        weights_.push_back(b_.upload(weights_by_name(block)));
        gradients_.push_back(b_.gradient(
            std::vector<float>(block.elements, std::numeric_limits<float>::quiet_NaN())));
        b_.compute->clear_gradient(*b_.stream, first() + gradients_.size() - 1, gradients_.back());
      }
    }
  }

  LayerResults train() {
    LayerResults found;
    for (const bool first : {true, false}) {
      const DeviceBytes dy = b_.upload(b_.activation_values(first ? 10 : 11));
      const DeviceBytes out = pass(b_.upload(b_.activation_values(first ? 20 : 21)), dy,
                                   first ? model::Accumulation::first : model::Accumulation::later);
      append(found.out, b_.download(out));
      append(found.dx, b_.download(dy));
    }
    for (std::size_t i = 0; i < gradients_.size(); ++i) {
      const std::vector<double> values = b_.values(gradients_[i]);
      for (const model::TensorSpec& tensor : b_.architecture.blocks[first() + i].tensors) {
        std::vector<double>& whole = found.gradients[tensor.name];
        whole.resize(whole_size(tensor), std::numeric_limits<double>::quiet_NaN());
        for_elements(tensor,
                     [&](Elems at, Elems in_all) { whole[in_all] = values[tensor.offset + at]; });
      }
    }
    return found;
  }

 private:
  [[nodiscard]] std::size_t first() const { return b_.architecture.first_layer(); }
  [[nodiscard]] std::size_t end() const { return first() + weights_.size(); }

  DeviceBytes filled(Bytes bytes) {
    return b_.upload(std::vector<double>(bytes / size_of(b_.type), before_));
  }
  static void append(std::vector<double>& to, const std::vector<double>& values) {
    to.insert(to.end(), values.begin(), values.end());
  }

  /// End of the layer or half of a layer that begins with `block`.
  [[nodiscard]] std::size_t end_from(std::size_t block) const {
    do {
      ++block;
    } while (block < end() && b_.architecture.is_layer_tile(block));
    return block;
  }

  /// Returns the output and replaces `dy` by the gradient of `in`.
  DeviceBytes pass(DeviceBytes in, DeviceBytes dy, model::Accumulation accumulation) {
    std::vector<std::pair<std::size_t, DeviceBytes>> inputs;
    for (std::size_t block = first(); block < end(); block = end_from(block)) {
      inputs.emplace_back(block, in);
      const DeviceBytes out = b_.activation();
      forward(block, in, out);
      in = out;
    }
    for (; !inputs.empty(); inputs.pop_back()) {
      backward(inputs.back().first, inputs.back().second, dy, accumulation);
    }
    b_.stream->synchronize();
    return in;
  }
  void forward(std::size_t block, DeviceBytes in, DeviceBytes out) {
    const std::size_t last = end_from(block) - 1;
    if (last == block) {
      b_.kernels().layer_forward(*b_.stream, block, weights(block), positions_, in, out, {});
      return;
    }
    b_.kernels().normalize(*b_.stream, block, weights(block), in, rows_, sums_);
    for (std::size_t tile = block + 1; tile <= last; ++tile) {
      b_.kernels().tile_forward(*b_.stream, tile, weights(tile), positions_, rows_, sums_,
                                tile == last ? out : DeviceBytes());
    }
  }
  void backward(std::size_t block, DeviceBytes in, DeviceBytes dy,
                model::Accumulation accumulation) {
    const std::size_t last = end_from(block) - 1;
    if (last == block) {
      b_.kernels().layer_backward(*b_.stream, block, weights(block), positions_, in, dy,
                                  gradient(block), accumulation, {});
      return;
    }
    b_.kernels().normalize(*b_.stream, block, weights(block), in, rows_, {});
    for (std::size_t tile = last; tile > block; --tile) {
      b_.kernels().tile_backward(*b_.stream, tile, weights(tile), positions_, rows_, dy, sums_,
                                 gradient(tile), accumulation);
    }
    b_.kernels().norm_backward(*b_.stream, block, weights(block), in, sums_, dy, gradient(block));
  }
  [[nodiscard]] DeviceBytes weights(std::size_t block) const { return weights_[block - first()]; }
  [[nodiscard]] DeviceView<float> gradient(std::size_t block) const {
    return gradients_[block - first()];
  }

  Bench b_;
  double before_;
  DeviceView<const std::int32_t> positions_;  ///< empty unless packed
  DeviceBytes rows_;
  DeviceView<float> sums_;
  std::vector<DeviceBytes> weights_;  ///< weights of the blocks of layers
  std::vector<DeviceView<float>> gradients_;
};

}  // namespace ballast::test
