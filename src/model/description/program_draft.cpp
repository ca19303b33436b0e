#include "src/model/description/program_draft.h"

#include <algorithm>

#include <fmt/format.h>

#include "ballast/core/error.h"

namespace ballast::model::passes {

ProgramDraft::ProgramDraft(const ProgramShape& model)
    : shape(model),
      input(model.blocks.size(), kNone),
      kept(model.blocks.size(), kNone),
      kept_attention(model.blocks.size(), kNone),
      rows(model.blocks.size(), kNone),
      sums(model.blocks.size(), kNone),
      rows_gradient(model.blocks.size(), kNone),
      routing(model.blocks.size(), kNone),
      residual(model.blocks.size(), kNone),
      result_gradient(model.blocks.size(), kNone),
      reference(model.blocks.size(), kNone),
      reference_rows(model.blocks.size(), kNone),
      reference_sums(model.blocks.size(), kNone),
      reference_routing(model.blocks.size(), kNone),
      keys_values(model.blocks.size(), kNone),
      keys_values_gradient(model.blocks.size(), kNone),
      normed_gradient(model.blocks.size(), kNone),
      gradient(model.blocks.size(), kNone),
      tied_gradient(model.blocks.size(), kNone) {
  program.first_layer = model.first_layer();
  program.first_differentiated = model.first_differentiated;
  program.head = model.head();
  program.counts_step = model.counts_step;
  const ClassId of_batch = add_class({.name = "batch",
                                      .word = "batch",
                                      .memory = MemoryKind::batch,
                                      .bytes = model.batch,
                                      .buffers = BufferRule::step,
                                      .from_host = true});
  batch = add_value({.name = "batch", .of = of_batch});
  add_stream();
  add_intermediates();
  add_halves();
  add_routing();
  add_head();
  add_reference();
  add_links();
  add_sums();
  if (shape.tensor > 1) add_exchanges();
}

/// Adds the activations between blocks and their gradient.
void ProgramDraft::add_stream() {
  const ClassId between = add_class({.name = "activations in transit",
                                     .word = "activation",
                                     .bytes = shape.activation,
                                     .buffers = BufferRule::in_turn});
  ClassId inside = kNone;  // between the halves of a layer
  for (BlockId b = shape.first_layer(); b <= program.head; ++b) {
    if (shape.continues(b)) continue;
    StepValue value = {
        .name = fmt::format("input of {}", block(b).name), .of = between, .owner = b};
    const bool waits = b < program.head && shape.is_differentiated(b);
    if (block(b).role == BlockRole::mid_norm) {
      if (inside == kNone) {
        inside = add_class({.name = "input of the second half",
                            .word = "activation",
                            .bytes = shape.activation,
                            .in_evaluation = between});
      }
      value.of = inside;
      value.waits = waits ? Waits::kept : Waits::no;
    } else if (waits) {
      value.waits = Waits::placed;
    }
    input[b] = add_value(std::move(value));
  }
  flow = add_value({.name = "activation gradient",
                    .of = add_class({.name = "activation gradient",
                                     .word = "activation gradient",
                                     .bytes = shape.activation})});
}

/// Adds the intermediates of layers in one piece, and those of their attention alone.
void ProgramDraft::add_intermediates() {
  const auto for_layers = [this](Bytes BlockShape::*size, const auto& add) {
    for (BlockId b = shape.first_layer(); b < program.head; ++b) {
      const bool is_layer = block(b).role == BlockRole::layer && shape.is_differentiated(b);
      if (is_layer && block(b).*size > 0) add(b, block(b));
    }
  };
  ClassId intermediates = kNone;
  for_layers(&BlockShape::intermediates, [&](BlockId b, const BlockShape& layer) {
    if (intermediates == kNone) {
      intermediates = add_class(
          {.name = "intermediates", .word = "intermediates", .memory = MemoryKind::intermediates});
    }
    kept[b] = add_value({.name = fmt::format("{} intermediates", layer.name),
                         .of = intermediates,
                         .owner = b,
                         .waits = Waits::kept,
                         .bytes = layer.intermediates});
  });
  ClassId attention = kNone;
  for_layers(&BlockShape::kept_attention, [&](BlockId b, const BlockShape& layer) {
    if (attention == kNone) {
      attention = add_class({.name = "results of attention in transit",
                             .word = "results of attention",
                             .memory = MemoryKind::intermediates,
                             .buffers = BufferRule::in_turn});
    }
    Bytes& largest = program.classes[attention].bytes;
    largest = std::max(largest, layer.kept_attention);
    kept_attention[b] = add_value({.name = fmt::format("{} attention", layer.name),
                                   .of = attention,
                                   .owner = b,
                                   .waits = Waits::kept_attention,
                                   .bytes = layer.kept_attention});
  });
}

/// Adds the norm's result and the sums that all tiles of a half or of the head share.
void ProgramDraft::add_halves() {
  ClassId of_rows = kNone;
  ClassId of_sums = kNone;
  const auto add = [&](BlockId b, Waits waits) {
    if (of_rows == kNone) {
      of_rows = add_class({.name = "rows between tiles", .word = "rows", .bytes = shape.rows});
      of_sums = add_class({.name = "sums over tiles", .word = "sums", .bytes = shape.sums()});
    }
    const std::string& name = block(b).name;
    rows[b] = add_value(
        {.name = fmt::format("rows of {}", name), .of = of_rows, .owner = b, .waits = waits});
    if (b != program.head) {
      sums[b] = add_value({.name = fmt::format("sums of {}", name), .of = of_sums, .owner = b});
    }
    if (!shape.is_differentiated(b)) return;
    rows_gradient[b] =
        add_value({.name = fmt::format("gradient of rows of {}", name), .of = of_sums, .owner = b});
  };
  for (BlockId b = shape.first_layer(); b < program.head; ++b) {
    const BlockRole role = block(b).role;
    if (role != BlockRole::norm && role != BlockRole::mid_norm && role != BlockRole::router)
      continue;
    add(b, shape.is_differentiated(b) ? Waits::again : Waits::no);
  }
  if (shape.visits_tiles()) add(program.head, Waits::no);
}

void ProgramDraft::add_routing() {
  ClassId counts = kNone;
  for (BlockId b = shape.first_layer(); b < program.head; ++b) {
    if (block(b).role != BlockRole::router) continue;
    if (counts == kNone) {
      first_router = b;
      counts = add_class({.name = "routing",
                          .word = "routing",
                          .memory = MemoryKind::batch,
                          .bytes = shape.routing,
                          .counts = true});
      router_totals = add_value({.name = "sums over routers",
                                 .of = add_class({.name = "sums over routers",
                                                  .word = "sums over routers",
                                                  .memory = MemoryKind::batch,
                                                  .bytes = shape.router_totals}),
                                 .owner = b});
    }
    last_router = b;
    routing[b] =
        add_value({.name = fmt::format("{} routing", block(b).name), .of = counts, .owner = b});
  }
  add_experts_around_norms();
}

/// Adds the residual stream around experts that read another norm or whose sum has one, and the
/// gradients on the other side of these norms.
void ProgramDraft::add_experts_around_norms() {
  ClassId streams = kNone;
  ClassId gradients = kNone;
  const auto add = [&](ClassId& of, const char* name, const char* word, BlockId b) {
    if (of == kNone) of = add_class({.name = name, .word = word, .bytes = shape.activation});
    return add_value({.name = fmt::format("{} at {}", name, block(b).name), .of = of, .owner = b});
  };
  for (BlockId b = shape.first_layer(); b < program.head; ++b) {
    if (block(b).role != BlockRole::router) continue;
    const bool has_norm = block(shape.last_of(b) + 1).role == BlockRole::result_norm;
    if (!has_norm && !shares_norm(b)) continue;
    residual[b] = add(streams, "residual stream around experts", "residual stream", b);
    if (!shape.is_differentiated(b)) continue;
    ValueId& gradient_at_norm = has_norm ? result_gradient[b] : normed_gradient[b];
    gradient_at_norm = add(gradients, "gradient at the norm of experts", "gradient of rows", b);
  }
}

void ProgramDraft::add_head() {
  const auto reported = [this](std::string name, Bytes bytes) {
    const ClassId of = add_class({.name = name,
                                  .word = "losses",
                                  .memory = MemoryKind::batch,
                                  .bytes = bytes,
                                  .buffers = BufferRule::report});
    return add_value({.name = std::move(name), .of = of, .owner = program.head});
  };
  losses = reported("losses", shape.losses);
  if (last_router != kNone) router_losses = reported("losses of routers", shape.router_losses);
  if (!shape.visits_tiles() || shape.tensor > 1) return;
  program.one_pass = OnePassHead{.keeper = program.head};
  for (std::uint32_t t = 0; t < shape.tiles(); ++t) {
    program.one_pass->on_device.push_back(shape.block_of_tile(t));
  }
  if (block(program.head).intermediates == 0) return;
  logits = add_value({.name = "logits",
                      .of = add_class({.name = "logits",
                                       .word = "logits",
                                       .memory = MemoryKind::intermediates,
                                       .bytes = block(program.head).intermediates,
                                       .buffers = BufferRule::scratch}),
                      .owner = program.head});
}

/// Adds the values of the reference model's forward pass. Only its losses are kept.
void ProgramDraft::add_reference() {
  if (!shape.pairs) return;
  pairs = add_value({.name = "pairs",
                     .of = add_class({.name = "pairs",
                                      .word = "pairs",
                                      .memory = MemoryKind::batch,
                                      .bytes = shape.pair_results,
                                      .buffers = BufferRule::step}),
                     .owner = program.head});
  const ClassId activations = add_class({.name = "activations of the reference",
                                         .word = "activation of the reference",
                                         .bytes = shape.activation,
                                         .buffers = BufferRule::in_turn});
  for (BlockId b = shape.first_layer(); b < program.head; ++b) {
    if (!shape.is_differentiated(b)) continue;
    if (block(b).role == BlockRole::table) {
      reference[b] = reference[b - 1];
      continue;
    }
    if (block(b).role == BlockRole::router) add_reference_half(b, activations);
    if (block(shape.first_of(b)).role == BlockRole::router) {
      reference[b] = reference[shape.first_of(b)];
      continue;
    }
    expects(block(b).role == BlockRole::layer, "step program: pairs with layers in tiles");
    reference[b] = add_value({.name = fmt::format("the reference's output of {}", block(b).name),
                              .of = activations,
                              .owner = b});
  }
  if (shape.tiles() == 1) return;
  reference_head_rows = add_value(
      {.name = "rows of the reference",
       .of = add_class(
           {.name = "rows of the reference", .word = "rows of the reference", .bytes = shape.rows}),
       .owner = program.head});
}

/// Adds what the reference model's passes through a router and its experts share. They choose other
/// experts than those of the trained model.
void ProgramDraft::add_reference_half(BlockId router, ClassId activations) {
  const std::string& name = block(router).name;
  const auto add = [&](std::string_view what, ClassId of) {
    return add_value(
        {.name = fmt::format("the reference's {} of {}", what, name), .of = of, .owner = router});
  };
  reference[router] = add("output", activations);
  reference_rows[router] = add("rows", program.values[rows[router]].of);
  reference_sums[router] = add("sums", program.values[sums[router]].of);
  reference_routing[router] = add("routing", program.values[routing[router]].of);
}

/// Adds the values that layers share besides the residual stream.
void ProgramDraft::add_links() {
  const auto add = [this](std::string name, Bytes bytes, BlockId owner) {
    const ClassId of = add_class({.name = name, .word = "values of layers", .bytes = bytes});
    return add_value({.name = std::move(name), .of = of, .owner = owner});
  };
  for (BlockId b = shape.first_layer(); b < program.head; ++b) {
    const Bytes bytes = block(b).keys_values;
    if (bytes == 0) continue;
    expects(!shape.pairs, "step program: pairs with shared keys and values");
    keys_values[b] = add(fmt::format("keys and values of {}", block(b).name), bytes, b);
    if (!shape.is_differentiated(b)) continue;
    keys_values_gradient[b] = add(fmt::format("gradient of keys and values of {}", block(b).name),
                                  block(b).keys_values_gradient, b);
  }
  if (shape.layer_inputs == 0) return;
  const BlockId first = shape.first_layer();
  layer_inputs = add("layer inputs", shape.layer_inputs, first);
  if (!shape.trains_layer_inputs) return;
  layer_inputs_gradient = add("gradient of layer inputs", shape.layer_inputs, first);
}

/// Adds the values that tensor places exchange.
void ProgramDraft::add_exchanges() {
  embedded = add_value(
      {.name = "rows of the embedding of this place",
       .of = add_class(
           {.name = "rows of the embedding", .word = "rows", .bytes = shape.activation})});
  const ClassId gradients = add_class({.name = "gradients of rows between places",
                                       .word = "gradient of rows",
                                       .bytes = shape.activation});
  for (BlockId b = 0; b <= program.head; ++b) {
    if (rows_gradient[b] == kNone) continue;
    normed_gradient[b] =
        add_value({.name = fmt::format("gradient of rows of {}, summed", block(b).name),
                   .of = gradients,
                   .owner = b});
  }
  row_sums = add_value(
      {.name = "softmax sums of this place",
       .of = add_class(
           {.name = "softmax sums of a place", .word = "softmax sums", .bytes = shape.row_sums}),
       .owner = program.head});
  all_row_sums = add_value({.name = "softmax sums of all places",
                            .of = add_class({.name = "softmax sums of all places",
                                             .word = "softmax sums",
                                             .bytes = shape.tensor * shape.row_sums}),
                            .owner = program.head});
  received = add_value({.name = "terms of other places",
                        .of = add_class({.name = "terms of other places",
                                         .word = "terms of other places",
                                         .bytes = shape.sum_scratch,
                                         .buffers = BufferRule::scratch}),
                        .owner = program.head});
}

void ProgramDraft::add_sums() {
  const auto add = [this](GradientSum sum) {
    program.sums.push_back(sum);
    return static_cast<SumId>(program.sums.size() - 1);
  };
  for (BlockId b = 0; b < shape.blocks.size(); ++b) {
    if (block(b).is_frozen() || block(b).role == BlockRole::table) continue;
    gradient[b] = add({.block = b,
                       .bytes = block(b).gradient,
                       .cleared = block(b).cleared,
                       .by_token = block(b).by_token});
  }
  if (!shape.trains_tied()) return;
  for (std::uint32_t t = 0; t < shape.tiles(); ++t) {
    tied_gradient[t] = add({.block = t, .bytes = shape.tied_gradient, .clears = false});
  }
}

ValueId ProgramDraft::reference_input(BlockId id) const {
  const bool same = id <= shape.first_layer() || reference[id - 1] == kNone;
  return same ? input[id] : reference[id - 1];
}

BlockId ProgramDraft::source_of_keys(BlockId id) const {
  BlockId source = id;
  while (block(source).layer > block(id).keys_of) --source;
  return shape.first_of(source);
}

bool ProgramDraft::is_last_reader(BlockId id) const {
  for (BlockId later = id + 1; later < program.head; ++later) {
    const bool attends = block(later).role != BlockRole::table;
    if (attends && block(later).keys_of == block(id).keys_of) return false;
  }
  return true;
}

ClassId ProgramDraft::add_class(ValueClass one) {
  program.classes.push_back(std::move(one));
  return static_cast<ClassId>(program.classes.size() - 1);
}

ValueId ProgramDraft::add_value(StepValue value) {
  program.values.push_back(std::move(value));
  return static_cast<ValueId>(program.values.size() - 1);
}

PassId ProgramDraft::add(Pass pass) {
  // The kernels depend on the block, the arguments and the model. Whether an optional argument is
  // bound is not known here.
  std::vector<std::uint32_t> key = {static_cast<std::uint32_t>(pass.kernel),
                                    block(pass.block).alike, pass.reference};
  for (const Operand& operand : pass.operands) {
    if (operand.optional) continue;
    key.push_back(static_cast<std::uint32_t>(operand.port));
    key.push_back(static_cast<std::uint32_t>(operand.access));
  }
  const auto next = static_cast<std::uint16_t>(shapes_.size());
  pass.shape = shapes_.try_emplace(std::move(key), next).first->second;
  program.passes.push_back(std::move(pass));
  return static_cast<PassId>(program.passes.size() - 1);
}

void ProgramDraft::recompute(ValueId value, std::vector<Stop> stops) {
  program.values[value].recipe = static_cast<RecipeId>(program.recipes.size());
  program.recipes.push_back({std::move(stops)});
}

}  // namespace ballast::model::passes
