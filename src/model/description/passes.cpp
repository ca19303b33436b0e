#include <array>
#include <string_view>
#include <utility>

#include "src/model/description/program_draft.h"

namespace ballast::model {
namespace {

struct KernelWords {
  std::string_view name;
  std::string_view work;  ///< see work_of()
};

constexpr std::array<KernelWords, kKernelCount> kKernels = {{
    {"embed", "forward"},
    {"embed backward", "backward"},
    {"layer", "forward"},
    {"layer backward", "backward"},
    {"norm", "norm"},
    {"norm backward", "backward"},
    {"tile", "forward"},
    {"tile backward", "backward"},
    {"shared expert", "forward"},
    {"shared expert backward", "backward"},
    {"router", "router"},
    {"router backward", "backward"},
    {"router losses", "losses of routers"},
    {"expert", "forward"},
    {"expert backward", "backward"},
    {"exchanged expert", "forward"},
    {"exchanged expert backward", "backward"},
    {"result norm", "norm"},
    {"result norm backward", "backward"},
    {"head evaluate", "forward"},
    {"head train", "forward and backward"},
    {"head scan", "sums of logits"},
    {"head differentiate", "backward of logits"},
    {"head end", "loss"},
    {"head merge", "sums of logits"},
    {"sum tiles", "sum over ranks"},
    {"share row sums", "sums of logits over ranks"},
}};
static_assert(static_cast<std::size_t>(Kernel::share_row_sums) + 1 == kKernelCount);

constexpr std::array<std::string_view, kPortCount> kPortNames = {
    "weights",
    "output weights",
    "batch",
    "input",
    "output",
    "activation gradient",
    "kept",
    "kept attention",
    "normed",
    "partial sums",
    "normed gradient",
    "residual stream",
    "gradient of the result",
    "row sums",
    "all row sums",
    "terms",
    "received",
    "routing",
    "routing counts",
    "all routing counts",
    "router totals",
    "losses",
    "pairs",
    "keys and values",
    "gradient of keys and values",
    "layer inputs",
    "gradient of layer inputs",
    "table rows",
    "gradient",
    "output gradient",
    "gradient of table rows",
    "workspace",
};
static_assert(static_cast<std::size_t>(Port::workspace) + 1 == kPortCount);

/// Writes the stops of a program in the order in which micro-batches pass them.
class StopWriter {
 public:
  explicit StopWriter(const ProgramShape& shape) : shape_(shape), draft_(shape) {}

  StepProgram write() {
    name_blocks();
    const BlockId head = draft_.program.head;
    for (BlockId b = 0; b < head; ++b) forward(b);
    recipes();
    passes::train_head(draft_, draft_.program.training);
    passes::evaluate_head(draft_, draft_.program.evaluation);
    if (shape_.counts_step) {
      draft_.program.training.push_back(
          {.passes = {passes::router_losses(draft_)}, .backward = true});
    }
    for (BlockId b = head; b-- > shape_.first_differentiated;) backward(b);
    return std::move(draft_.program);
  }

 private:
  void name_blocks() {
    for (BlockId b = 0; b < shape_.blocks.size(); ++b) {
      const BlockShape& block = shape_.blocks[b];
      StepBlock named = {.name = block.name};
      if (block.role == BlockRole::expert || block.role == BlockRole::exchanged_expert) {
        named.rows = RowCount{.routing = draft_.routing[shape_.first_of(b)],
                              .reference_routing = draft_.reference_routing[shape_.first_of(b)],
                              .index = block.expert,
                              .share = block.token_share};
        named.per_rank = block.role == BlockRole::exchanged_expert;
      }
      if (b >= shape_.first_layer() && b < draft_.program.head) named.layer = block.layer;
      named.attention = block.attention;
      named.selected = block.selected;
      named.row_gradients = block.row_gradients;
      draft_.program.blocks.push_back(std::move(named));
    }
  }

  void forward(BlockId b) {
    if (shape_.blocks[b].role == BlockRole::table) return;  // the passes of its layer read it
    std::vector<PassId> reference;
    if (shape_.pairs && draft_.reference[b] != kNone) {
      reference.push_back(reference_pass(b));
    }
    const PassId training = forward_pass(b, true);
    const bool differs = draft_.kept[b] != kNone || draft_.kept_attention[b] != kNone ||
                         shape_.blocks[b].role == BlockRole::router;
    const PassId evaluation = differs ? forward_pass(b, false) : training;
    const PassId sum = sum_after(b);
    const auto stop = [&](PassId pass) {
      Stop one = {.passes = reference};
      one.passes.push_back(pass);
      if (sum != kNone) one.passes.push_back(sum);
      return one;
    };
    draft_.program.training.push_back(stop(training));
    draft_.program.evaluation.push_back(stop(evaluation));
  }

  /// Returns a pass that adds what the tensor places have computed for the half of a layer or the
  /// embedding that ends with `b`; kNone if there is none.
  PassId sum_after(BlockId b) {
    if (shape_.tensor == 1 || shape_.last_of(b) != b) return kNone;
    const BlockRole role = shape_.blocks[b].role;
    if (role == BlockRole::embedding) return passes::sum_embeddings(draft_, b);
    return role == BlockRole::tile ? passes::sum_outputs(draft_, shape_.first_of(b)) : kNone;
  }

  PassId forward_pass(BlockId b, bool training) {
    switch (shape_.blocks[b].role) {
      case BlockRole::embedding:
        return passes::embed(draft_, b);
      case BlockRole::norm:
      case BlockRole::mid_norm:
        return passes::norm(draft_, b);
      case BlockRole::router:
        return passes::router(draft_, b, training);
      case BlockRole::tile:
      case BlockRole::shared_expert:
        return passes::tile(draft_, b);
      case BlockRole::expert:
      case BlockRole::exchanged_expert:
        return passes::expert(draft_, b);
      case BlockRole::result_norm:
        return passes::result_norm(draft_, b);
      case BlockRole::table:
      case BlockRole::layer:
      case BlockRole::head:
      case BlockRole::head_tile:
        break;
    }
    return passes::layer(draft_, b, training);
  }

  PassId reference_pass(BlockId b) {
    switch (shape_.blocks[b].role) {
      case BlockRole::router:
        return passes::reference_router(draft_, b);
      case BlockRole::shared_expert:
        return passes::tile(draft_, b, passes::Whose::reference);
      case BlockRole::expert:
      case BlockRole::exchanged_expert:
        return passes::expert(draft_, b, passes::Whose::reference);
      default:
        return passes::reference_layer(draft_, b);
    }
  }

  /// The backward pass recomputes the norm's result of each half, for its tiles, and the whole
  /// first half of a layer, for the input of the second.
  void recipes() {
    for (BlockId b = shape_.first_differentiated; b < draft_.program.head; ++b) {
      if (draft_.rows[b] == kNone) continue;
      const bool routes = shape_.blocks[b].role == BlockRole::router;
      const PassId again = routes ? passes::router_again(draft_, b) : passes::norm_again(draft_, b);
      draft_.recompute(draft_.rows[b], {{.passes = {again}}});
      if (shape_.blocks[b].role != BlockRole::mid_norm) continue;
      // The forward pass has one stop per block, because layers in tiles have no tables.
      const auto stops = draft_.program.training.begin();
      draft_.recompute(draft_.input[b], {stops + shape_.first_of(b - 1), stops + b});
    }
  }

  void backward(BlockId b) {
    if (shape_.blocks[b].role == BlockRole::table) return;
    Stop stop = {.finishes = {b}, .backward = true};
    if (shape_.blocks[b + 1].role == BlockRole::table) stop.finishes = {b + 1, b};
    const bool embedding = shape_.blocks[b].role == BlockRole::embedding;
    // No pass reads the gradient of the tokens.
    if (!embedding || !shape_.blocks[b].is_frozen()) stop.passes = {backward_pass(b)};
    const BlockId half = shape_.first_of(b);
    if (shape_.tensor > 1 && shape_.blocks[b].role == BlockRole::tile && b == half + 1) {
      stop.passes.push_back(passes::sum_gradients(draft_, half, shape_.tiles_of_half(half)));
    }
    if (embedding && shape_.tensor > 1 && shape_.trains_tied()) {
      stop.passes.push_back(passes::differentiate_tied(draft_, b));
    }
    const bool two_forms = embedding && shape_.trains_tied() && draft_.program.one_pass.has_value();
    if (!two_forms) return draft_.program.training.push_back(std::move(stop));
    stop.form = HeadForm::one_pass;
    draft_.program.training.push_back(stop);
    stop.form = HeadForm::visits;
    stop.passes.push_back(passes::differentiate_tied(draft_, b));
    draft_.program.training.push_back(std::move(stop));
  }

  PassId backward_pass(BlockId b) {
    switch (shape_.blocks[b].role) {
      case BlockRole::embedding:
        return passes::embed_backward(draft_, b);
      case BlockRole::norm:
      case BlockRole::mid_norm:
        return passes::norm_backward(draft_, b);
      case BlockRole::router:
        return passes::router_backward(draft_, b);
      case BlockRole::tile:
      case BlockRole::shared_expert:
        return passes::tile_backward(draft_, b);
      case BlockRole::expert:
      case BlockRole::exchanged_expert:
        return passes::expert_backward(draft_, b);
      case BlockRole::result_norm:
        return passes::result_norm_backward(draft_, b);
      case BlockRole::table:
      case BlockRole::layer:
      case BlockRole::head:
      case BlockRole::head_tile:
        break;
    }
    return passes::layer_backward(draft_, b);
  }

  const ProgramShape& shape_;
  passes::ProgramDraft draft_;
};

}  // namespace

StepProgram write_program(const ProgramShape& shape) {
  return StopWriter(shape).write();
}

StepProgram write_program(const Architecture& model, DType type, const StepShape& shape,
                          const KernelSizes& sizes) {
  return write_program(shape_of(model, type, shape, sizes));
}

std::string_view to_string(Kernel kernel) noexcept {
  return kKernels[static_cast<std::size_t>(kernel)].name;
}

std::string_view work_of(Kernel kernel) noexcept {
  return kKernels[static_cast<std::size_t>(kernel)].work;
}

std::string_view to_string(Port port) noexcept {
  return kPortNames[static_cast<std::size_t>(port)];
}

}  // namespace ballast::model
