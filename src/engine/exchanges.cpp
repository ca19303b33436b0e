#include "ballast/comm/communicator.h"
#include "ballast/model/step_program.h"
#include "ballast/step/labels.h"

#include "src/engine/handlers.h"

// Passes between the ranks that share the tiles of each matrix.

namespace ballast::engine {

using model::Port;

namespace {

/// Adds what the tiles of all tensor places have computed: in the forward pass after the input of
/// the half, in the order of the tiles; gradients in the opposite order.
void sum_tiles(const CurrentOperation& at, const model::Pass& pass) {
  const model::PassArguments arguments = arguments_of(at, pass);
  const bool gradients = !arguments[Port::normed_gradient].empty();
  const Blueprint& blueprint = at.blueprint();
  const Elems elements = blueprint.shape.tokens() * blueprint.model.config.hidden_size;
  // Terms of the embedding are activations.
  const bool embedding = blueprint.own().blocks[pass.block].kind == model::BlockKind::embedding;
  const comm::OrderedSum sum = {.elements = elements,
                                .terms = pass.number,
                                .term_type = embedding ? blueprint.type : DType::f32,
                                .type = blueprint.type,
                                .descending = gradients};
  const DeviceBytes out = arguments[gradients ? Port::normed_gradient : Port::output];
  at.channels().tensor->sum_terms(
      *at.channels().stream, sum, arguments[Port::terms].subview(0, sum.bytes_of_terms()),
      arguments[Port::input], out.subview(0, sum.bytes()), arguments[Port::received]);
}

void share_row_sums(const CurrentOperation& at, const model::Pass& pass) {
  const model::PassArguments arguments = arguments_of(at, pass);
  at.channels().tensor->all_gather(*at.channels().stream, arguments[Port::row_sums],
                                   arguments[Port::all_row_sums]);
}

}  // namespace

void run_exchange(const CurrentOperation& at) {
  const model::Pass& pass = at.problem().program().passes[step::pass_id(at.operation)];
  if (pass.kernel == model::Kernel::share_row_sums) {
    share_row_sums(at, pass);
  } else {
    sum_tiles(at, pass);
  }
}

}  // namespace ballast::engine
