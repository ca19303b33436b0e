#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "ballast/core/error.h"
#include "ballast/model/architecture.h"
#include "ballast/model/kernel_sizes.h"
#include "ballast/model/pass_arguments.h"

#include "src/model/compute/head.h"
#include "src/model/compute/pass_views.h"

namespace ballast::model {

/// Passes of the head. Each function returns the work of a pass, a function without arguments that
/// calls operations. `Ops`: layer.h. References must outlive the object.
template <class Ops>
class HeadKernels {
 public:
  using T = typename Ops::Value;

  HeadKernels(const Architecture& model, const MicroBatchShape& shape, Ops& ops, Head<Ops>& head,
              const TileSums<Ops>& tile_sums)
      : model_(model),
        tokens_(shape.tokens()),
        views_(model, shape),
        norm_(find_norm(model.blocks[model.head()], model.outer.norm, model.outer.norm_offset)),
        ops_(ops),
        head_(head),
        tile_sums_(tile_sums) {}

  /// Offsets of the norm before the output matrix.
  [[nodiscard]] const NormAt& norm() const { return norm_; }

  auto evaluate(const Pass& pass, const PassArguments& args) {
    expects(model_.config.vocabulary_tiles == 1, "the head has several tiles: visit each");
    const OutputRows<T> tile = views_.output_tiles(args).front();
    return [=, this, norm = weights_of<T>(args)[norm_], in = as<const T>(args[Port::input]),
            targets = args.batch.targets.raw(), losses = views_.losses_of(pass, args)] {
      ops_.check_tokens(targets, kLeastTarget);
      head_.forward(norm, tile, in, targets, losses);
    };
  }
  auto train(const Pass& pass, const PassArguments& args) {
    return [this, norm = weights_of<T>(args)[norm_], in = as<const T>(args[Port::input]),
            targets = args.batch.targets.raw(), tiles = views_.output_tiles(args),
            losses = views_.losses_of(pass, args), dx = as<T>(args[Port::activation_gradient]),
            kept = args[Port::kept].raw(), accumulation = args.scalars.accumulation,
            scale = args.scalars.loss_gradient] {
      ops_.check_tokens(targets, kLeastTarget);
      head_.train(norm, tiles, accumulation, in, targets, scale, dx, losses, kept);
    };
  }
  auto scan(const Pass& pass, const PassArguments& args) {
    HeadRows<T> known = rows_of(args);
    if (tile_sums_.apart()) {
      known.sums = as<RowSum<float>>(args[Port::row_sums]) + pass.number * tokens_;
    }
    return [=, this, targets = args.batch.targets.raw(), tile = views_.output_tile(pass, args),
            losses = views_.losses_of(pass, args)] {
      ops_.check_tokens(targets, kLeastTarget);
      head_.scan(tile, targets, known);
      if (!losses.out.empty()) head_.report_losses(targets, known, losses);
    };
  }
  auto differentiate(const Pass& pass, const PassArguments& args) {
    const bool pairs = !args[Port::pairs].empty();
    const RowTargets row_targets = {args.batch.targets.raw(),
                                    pairs ? views_.pairs_of(args).weights.raw() : nullptr};
    HeadRows<T> known = rows_of(args);
    if (known.dnormed != nullptr) known.dnormed = tile_sums_.part_of(known.dnormed, pass.number);
    return [=, this, tile = views_.output_tile(pass, args),
            accumulation = args.scalars.accumulation, scale = args.scalars.loss_gradient] {
      head_.differentiate(tile, accumulation, row_targets, scale, known);
    };
  }
  auto end(const Pass& pass, const PassArguments& args) {
    return [this, norm = weights_of<T>(args)[norm_], in = as<const T>(args[Port::input]),
            targets = args.batch.targets.raw(), dx = as<T>(args[Port::activation_gradient]),
            known = rows_of(args), losses = views_.losses_of(pass, args)] {
      if (!losses.out.empty()) head_.report_losses(targets, known, losses);
      if (dx != nullptr) head_.end(norm, in, known, dx);
    };
  }
  auto merge(const PassArguments& args) {
    const std::size_t tiles = model_.own_vocabulary_tiles();
    const RowSumsOfTiles all = {
        .sums = as<const RowSum<float>>(args[Port::all_row_sums]),
        .places = model_.split.tensor,
        .tiles = tiles,
        .rows = tokens_,
        .step = round_up(tiles * tokens_ * kRowSumBytes, kPage) / kRowSumBytes};
    return [=, this, known = rows_of(args)] { ops_.merge_row_sums(all, known.sums); };
  }

 private:
  /// Lower bound for targets, because negative ones are valid.
  static constexpr std::int32_t kLeastTarget = std::numeric_limits<std::int32_t>::min();

  /// Returns the rows that the tiles share, with the gradient of the norm's result.
  [[nodiscard]] HeadRows<T> rows_of(const PassArguments& args) const {
    HeadRows<T> rows = head_.rows_at(args[Port::normed].raw());
    rows.dnormed = as<float>(args[Port::partial_sums]);
    rows.given = as<const T>(args[Port::normed_gradient]);
    return rows;
  }

  const Architecture& model_;
  std::size_t tokens_;
  PassViews<T> views_;
  NormAt norm_;
  Ops& ops_;
  Head<Ops>& head_;
  const TileSums<Ops>& tile_sums_;
};

}  // namespace ballast::model
