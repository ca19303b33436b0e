#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "ballast/model/attention.h"

#include "src/model/compute/part.h"

namespace ballast::model {

/// Forward and backward passes of LatentMaps, between the layer's input and queries, keys and
/// values before rotation.
template <class T>
class LatentHeads {
 public:
  using Call = LayerCall<T>;

  LatentHeads(const LatentMaps& spec, const AttentionShape& shape, const Binder& binder,
              LayerTools<T>& tools)
      : spec_(spec), shape_(shape), tools_(tools), ops_(tools.ops), maps_(tools.maps) {
    const std::size_t hidden = tools.hidden;
    const bool low = spec.query_rank > 0;
    if (low) {
      query_down_ = binder.map(spec.query_down, hidden, spec.query_rank);
      query_norm_ = binder.norm(spec.query_norm);
    }
    query_ = binder.map(spec.query, low ? spec.query_rank : hidden, shape.width());
    down_ = binder.map(spec.down, hidden, spec.rank + spec.rotating);
    norm_ = binder.norm(spec.norm);
    up_ = binder.map(spec.up, spec.rank, shape.heads * (spec.plain + spec.values));
    // Adapters of the two maps of the layer's input are numbered together.
    std::vector<LinearAt> same_input = {first(), down_};
    number_adapters(same_input);
    first() = same_input.front();
    down_ = same_input.back();
  }

  void arrays(ArrayList& list, const LayerMoments& at) {
    const auto own = [&](const char* name, std::size_t width) {
      return list.own(name, by_token(width),
                      {at.at(LayerMoments::maps), at.at(LayerMoments::d_maps)});
    };
    if (query_down_) {
      low_queries_ = own("queries of low rank", spec_.query_rank);
      low_queries_normed_ = own("queries of low rank, normed", spec_.query_rank);
    }
    low_ = own("keys and values of low rank", down_.out);
    low_normed_ = own("keys and values of low rank, normed", spec_.rank);
  }
  void share(ArrayList& list, const LayerMoments& at, const SharedPlaces& places) {
    const auto moment = [](Moment when) { return ArrayLife{when, when}; };
    expanded_ =
        list.add(places.turn, "keys and values of low rank, expanded", by_token(up_.out),
                 {moment(at.at(LayerMoments::shape)), moment(at.at(LayerMoments::d_shape))});
  }
  void for_maps(const std::function<void(const LinearAt&, std::size_t)>& visit) const {
    if (query_down_) visit(*query_down_, tools_.rows());
    for (const LinearAt* map : {&query_, &down_, &up_}) visit(*map, tools_.rows());
  }
  /// Columns of a head of values.
  [[nodiscard]] std::size_t values() const { return spec_.values; }

  /// x [N, H] -> qkv.
  void project(const Call& call, const T* x, T* qkv) {
    const auto& block = call.block;
    const T* read = x;
    if (query_down_) {
      const std::size_t rank = query_down_->out;
      T* const normed = call.at(low_queries_normed_);
      maps_.linear(block, *query_down_, x, call.at(low_queries_), rank, rows());
      ops_.norms->norm_groups(block[query_norm_], whole(rank), call.at(low_queries_), rank, normed,
                              rank);
      read = normed;
    }
    maps_.linear(block, query_, read, qkv, shape_.row(), rows());
    T* const low = call.at(low_);
    T* const normed = call.at(low_normed_);
    maps_.linear(block, down_, x, low, down_.out, rows());
    ops_.norms->norm_groups(block[norm_], whole(spec_.rank), low, down_.out, normed, spec_.rank);
    T* const expanded = call.at(expanded_);
    maps_.linear(block, up_, normed, expanded, up_.out, rows());
    ops_.heads->copy_groups(heads(spec_.plain), expanded, in_expanded(), keys(qkv), in_row());
    ops_.heads->copy_groups(heads(spec_.rotating), low + spec_.rank, {down_.out, 0},
                            keys(qkv) + spec_.plain, in_row());
    ops_.heads->copy_groups(heads(spec_.values), expanded + spec_.plain, in_expanded(),
                            values_of(qkv), in_row(), shape_.head_dim - spec_.values);
  }
  /// dqkv, rotated back -> gradients of the weights and of x.
  void backward(const Call& call, const T* x, T* dqkv, const InputGradient<T>& dx) {
    const auto& block = call.block;
    T* const expanded = call.at(expanded_);
    T* const low = call.at(low_);
    T* const normed = call.at(low_normed_);
    ops_.heads->copy_groups(heads(spec_.plain), keys(dqkv), in_row(), expanded, in_expanded());
    ops_.heads->copy_groups(heads(spec_.values), values_of(dqkv), in_row(), expanded + spec_.plain,
                            in_expanded());
    maps_.linear_weight(block, up_, normed, expanded, up_.out, rows());
    maps_.linear_input(block, up_, expanded, up_.out, normed, rows());
    ops_.norms->norm_groups_backward(block[norm_], whole(spec_.rank), low, down_.out, normed,
                                     spec_.rank);
    ops_.heads->copy_groups(whole(spec_.rank), normed, {spec_.rank, 0}, low, {down_.out, 0});
    ops_.heads->sum_groups(heads(spec_.rotating), keys(dqkv) + spec_.plain, in_row(),
                           low + spec_.rank, down_.out);
    queries_backward(call, x, dqkv, dx);
    map_backward(call, down_, x, low, down_.out, dx, true);
  }

 private:
  void queries_backward(const Call& call, const T* x, const T* dqkv, const InputGradient<T>& dx) {
    const auto& block = call.block;
    if (!query_down_) return map_backward(call, query_, x, dqkv, shape_.row(), dx, dx.adds);
    const LinearAt& down = *query_down_;
    T* const normed = call.at(low_queries_normed_);
    maps_.linear_weight(block, query_, normed, dqkv, shape_.row(), rows());
    maps_.linear_input(block, query_, dqkv, shape_.row(), normed, rows());
    ops_.norms->norm_groups_backward(block[query_norm_], whole(down.out), call.at(low_queries_),
                                     down.out, normed, down.out);
    map_backward(call, down, x, normed, down.out, dx, dx.adds);
  }
  /// The backward pass of a map of the layer's input.
  void map_backward(const Call& call, const LinearAt& map, const T* x, const T* dy,
                    std::size_t step, const InputGradient<T>& dx, bool adds) {
    add_bias_gradient(ops_, call.block[map], dy, step, rows().count);
    maps_.linear_weight(call.block, map, x, dy, step, rows());
    maps_.linear_input(call.block, map, dy, step, dx.to, rows(), adds);
  }

  LinearAt& first() { return query_down_ ? *query_down_ : query_; }
  [[nodiscard]] Bytes by_token(std::size_t width) const {
    return shape_.tokens() * width * sizeof(T);
  }
  [[nodiscard]] MapRows rows() const { return {0, shape_.tokens()}; }
  /// One group of the first `width` columns.
  [[nodiscard]] Groups whole(std::size_t width) const { return {shape_.tokens(), 1, width}; }
  [[nodiscard]] Groups heads(std::size_t width) const {
    return {shape_.tokens(), shape_.heads, width};
  }
  [[nodiscard]] T* keys(T* qkv) const { return qkv + shape_.width(); }
  [[nodiscard]] T* values_of(T* qkv) const { return qkv + 2 * shape_.width(); }
  [[nodiscard]] GroupSteps in_row() const { return {shape_.row(), shape_.head_dim}; }
  [[nodiscard]] GroupSteps in_expanded() const { return {up_.out, spec_.plain + spec_.values}; }

  LatentMaps spec_;
  AttentionShape shape_;
  LayerTools<T>& tools_;
  DeviceOps<T>& ops_;
  AdaptedMaps<T>& maps_;
  std::optional<LinearAt> query_down_;
  NormAt query_norm_;  ///< only with query_down
  LinearAt query_;
  LinearAt down_;
  NormAt norm_;
  LinearAt up_;
  // Results of maps of low rank and of their norms, later their gradients.
  ArrayList::Id low_queries_ = 0;         ///< [N, query_rank]
  ArrayList::Id low_queries_normed_ = 0;  ///< [N, query_rank]
  ArrayList::Id low_ = 0;                 ///< [N, rank | rotating]
  ArrayList::Id low_normed_ = 0;          ///< [N, rank]
  ArrayList::Id expanded_ = 0;            ///< [N, heads x (plain | values)]
};

}  // namespace ballast::model
