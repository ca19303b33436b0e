#include "tests/unit/step/interpreter.h"

#include <algorithm>

#include <fmt/format.h>

#include "ballast/step/names.h"

namespace ballast::step::named {
namespace {

std::string show(const Content& content) {
  constexpr std::array<std::string_view, 21> kNames = {
      "nothing",          "weights",       "states",      "batch",
      "activation",       "intermediates", "flow",        "accumulator",
      "tied accumulator", "normed",        "head rows",   "routing",
      "routing of ranks", "router totals", "output sums", "normed gradient",
      "packed",           "reduced",       "statistics",  "losses",
      "verdict"};
  return fmt::format("{} (block {}, micro {}, number {}, extent {}{}{})",
                     kNames[static_cast<std::size_t>(content.what)], content.block, content.micro,
                     content.number, static_cast<int>(content.extent),
                     content.undone ? ", undone" : "", content.decoded ? ", decoded" : "");
}

}  // namespace

Interpreter::Interpreter(const TestProblem& problem, const Schedule& schedule)
    : problem_(problem),
      work_(problem.workload),
      schedule_(schedule),
      held_(schedule.buffers.size()),
      updates_(work_.blocks.size(), 0),
      due_(updates_),
      updated_groups_(work_.blocks.size(), 0) {
  for (std::uint32_t b = 0; b < work_.blocks.size(); ++b) {
    for (const auto& [buffer, content] : weight_homes(b, 0)) held_[buffer] = content;
    if (!trains()) continue;
    for (std::uint32_t g = 0; g < schedule.state_home[b].size(); ++g) {
      held_[schedule.state_home[b][g]] = {What::states, b, g, 0, own(b)};
    }
  }
}

void Interpreter::run(const Plan& plan) {
  plan_ = &plan;
  ++run_;
  const auto has = [&plan](Action action) {
    return std::any_of(plan.operations.begin(), plan.operations.end(),
                       [action](const auto& op) { return action_of(op) == action; });
  };
  training_ = has(Action::offload_statistics);
  filling_ = has(Action::initialize);
  in_pieces_ = filling_ || has(Action::read);
  if (&plan == &schedule_.rollback) undo_speculative_updates();
  for (std::uint32_t m = 0; m < plan.micro_batches; ++m) {
    held_[schedule_.batch_host[m]] = {What::batch, 0, m, run_, Extent::whole};
  }
  for (const plan::Operation& plain : plan.operations) {
    const Operation op(plain);
    seen_uses_ = 0;
    perform(op);
    if (seen_uses_ != op.uses.size()) complain(op, "uses what it does not need");
  }
  if (!training_) return;
  last_training_run_ = run_;
  last_micro_batches_ = plan.micro_batches;
  for (std::uint32_t b = 0; b < due_.size(); ++b) due_[b] += was_touched(b) ? 1 : 0;
}

void Interpreter::finish() {
  for (std::uint32_t b = 0; b < work_.blocks.size(); ++b) {
    std::vector<std::pair<BufferId, Content>> homes = weight_homes(b, due_[b]);
    for (std::uint32_t g = 0; trains() && g < work_.blocks[b].sub_groups.size(); ++g) {
      homes.emplace_back(schedule_.state_home[b][g], Content{What::states, b, g, due_[b], own(b)});
    }
    for (const auto& [home, wanted] : homes) {
      if (held_[home] == wanted) continue;
      complaints_.push_back(
          fmt::format("at the end a home holds {}, not {}", show(held_[home]), show(wanted)));
    }
  }
}

void Interpreter::perform(const Operation& op) {
  if (is_idle(op)) return rest(op);
  const Content input = filling_ ? Content{} : of_run(What::activation, op, op.micro);
  switch (op.action) {
    case Action::upload_batch:
      return copy(op, Role::batch_source, Role::batch, {What::batch, 0, op.micro, run_});
    case Action::fetch_weights:
    case Action::upload_weights:
    case Action::offload_weights:
    case Action::writeback_weights:
      return move_weights(op);
    case Action::gather_weights:
      return gather(op);
    case Action::decode_weights:
      return decode(op);
    case Action::forward:
      return forward(op);
    case Action::evaluate_head:
    case Action::train_head:
      return head(op);
    case Action::normalize:
      return normalize(op);
    case Action::route:
      return route(op);
    case Action::gather_routing:
      return gather_routing(op);
    case Action::offload_routing:
      return offload_routing(op);
    case Action::scan_head:
      return scan_head(op);
    case Action::differentiate_head:
      return differentiate_head(op);
    case Action::end_head:
      return end_head(op);
    case Action::offload_activation:
    case Action::writeback_activation:
    case Action::fetch_activation:
    case Action::upload_activation:
      return copy(op, Role::input, Role::output, input);
    case Action::clear_gradient:
      return clear(op);
    case Action::backward:
      return backward(op);
    case Action::pack_gradient:
      return pack(op);
    case Action::reduce_gradient:
      return reduce(op);
    case Action::offload_gradient:
      return offload_gradient(op);
    case Action::writeback_gradient:
    case Action::fetch_gradient: {
      const std::uint64_t run = op.lag == 0 ? run_ : last_training_run_;
      return copy(op, Role::gradient_source, Role::gradient,
                  filling_ ? Content{} : gradient(op, run, own(op.block)));
    }
    case Action::offload_statistics:
      return copy(op, Role::statistics_source, Role::statistics, of_run(What::statistics, op));
    case Action::offload_losses:
      return copy(op, Role::losses_source, Role::losses,
                  {What::losses, 0, plan_->micro_batches, run_});
    case Action::gate:
      return gate(op);
    case Action::fetch_states:
    case Action::upload_states:
    case Action::offload_states:
    case Action::writeback_states:
      return move_states(op);
    case Action::update_on_host:
    case Action::update_on_device:
      return update(op);
    case Action::initialize:
      return initialize(op);
    case Action::read:
      return read(op);
  }
}

/// Data that passes through a buffer smaller than its home does so in pieces; here each piece
/// stands for the whole.
void Interpreter::initialize(const Operation& op) {
  if (updates_[op.block] > 0) complain(op, "comes after updates");
  const Use& use = op.uses.front();
  seen_uses_ = 1;
  if (!use.writes) complain(op, "does not say what it writes");
  held_[use.buffer] = use.role == Role::weights  ? weights_in_piece(op)
                      : use.role == Role::states ? states(op)
                                                 : Content{};
}

void Interpreter::read(const Operation& op) {
  if (updates_[op.block] != due_[op.block]) complain(op, "comes before updates");
  const bool of_states = op.buffer(Role::states) != kNoBuffer;
  need(op, of_states ? Role::states : Role::weights, of_states ? states(op) : weights_in_piece(op));
}

/// What a fill or read has at a time: all weights, or those of one of two homes.
Content Interpreter::weights_in_piece(const Operation& op) const {
  if (splits_home(op.block) && op.offset > 0) return frozen_weights(op.block);
  Content all = weights(op.block, home(op.block));
  all.trained_only = splits_home(op.block);
  return all;
}

/// Frozen weights on their way to the device. Trained ones join them where both pass.
void Interpreter::move_frozen(const Operation& op) {
  const bool joined = op.offset > 0;
  if (joined &&
      op.offset != part_of(work_.blocks[op.block].gradient_bytes, Extent::whole, op.block)) {
    complain(op, "does not begin behind the trained weights");
  }
  const Lane first = trained_on_host(op.block) ? Lane::upload : Lane::fetch;
  if (!in_pieces_ && joined != (op.lane == first))
    complain(op, "is not where trained weights join");
  need(op, Role::weights_source, frozen_weights(op.block));
  put(op, Role::weights, frozen_weights(op.block));
}

/// Where weights are whole, a rank updates its shard. The other shards are old until all have been
/// gathered: torn.
void Interpreter::move_weights(const Operation& op) {
  const BufferId taken = op.buffer(Role::weights_source);
  if (taken != kNoBuffer && held_[taken].frozen_only) return move_frozen(op);
  const bool from_undo =
      op.speculation == Speculation::redoes && op.action == Action::fetch_weights;
  const Role source = from_undo ? Role::undo_weights : Role::weights_source;
  const Use from = op.use(source);
  const Use to = op.use(Role::weights);
  // The padding of undone weights is needed, the weights are restored.
  if (op.speculation == Speculation::redoes && op.action == Action::offload_weights) {
    seen_uses_ += 2;
    held_[to.buffer] = held_[from.buffer];
    if (!held_[from.buffer].undone) complain(op, "moves weights that were not undone");
    return;
  }
  const Extent held = from.buffer == kNoBuffer ? Extent::whole : held_[from.buffer].extent;
  const bool torn = held == Extent::torn || held == Extent::torn_share;
  if (from.shard && held == Extent::shard) complain(op, "takes a shard of a shard");
  if (!from.shard && torn) complain(op, "spreads shards of other ranks that are old");
  Content wanted = weights(op.block, held);
  wanted.trained_only = from.buffer != kNoBuffer && held_[from.buffer].trained_only;
  need(op, source, wanted);
  keep_old(op, Role::weights, Role::undo_weights);
  const Lane joining = trained_on_host(op.block) ? Lane::upload : Lane::fetch;
  const bool joins =
      !in_pieces_ && splits_home(op.block) && op.lane == joining && !from.shard && !to.shard;
  if (joins) {
    const Content& there = held_[to.buffer];
    if (!there.frozen_only || there.block != op.block) complain(op, "lacks the frozen weights");
  }
  const Extent moved = from.shard ? Extent::shard : held;
  Content arrived = weights(op.block, to.shard ? torn_home(op.block) : moved);
  arrived.trained_only = splits_home(op.block) && to.buffer == schedule_.trained_home[op.block];
  put(op, Role::weights, arrived);
  // Below the device they join those that are there.
  const Buffer& place = schedule_.buffers[to.buffer];
  const BlockWork& work = work_.blocks[op.block];
  held_[to.buffer].trained_only = place.tier == Tier::device && place.kind == Kind::staging &&
                                  part_of(work.gradient_bytes, Extent::whole, op.block) <
                                      part_of(work.weight_bytes, Extent::whole, op.block) &&
                                  op.bytes < part_of(work.weight_bytes, home(op.block), op.block);
  if (joins) held_[to.buffer].trained_only = false;
  const bool alone = in_pieces_ || to.buffer == schedule_.trained_home[op.block];
  if (splits_home(op.block) && alone) held_[to.buffer].trained_only = true;
  if (wanted.trained_only && op.bytes > part_of(work.gradient_bytes, Extent::whole, op.block)) {
    complain(op, "moves frozen weights that are not there");
  }
  if (to.shard && moved != Extent::shard) complain(op, "writes more than a shard");
}

void Interpreter::move_states(const Operation& op) {
  const bool from_undo = op.speculation == Speculation::redoes && op.action == Action::fetch_states;
  need(op, from_undo ? Role::undo_states : Role::states_source, states(op));
  keep_old(op, Role::states, Role::undo_states);
  put(op, Role::states, states(op));
}

void Interpreter::gather(const Operation& op) {
  const bool in_place = op.buffer(Role::weights_source) == kNoBuffer;
  const RankGroup kept = home(op.block) == Extent::whole ? RankGroup::all : RankGroup::same_share;
  if (op.plain.group != (in_place ? kept : RankGroup::weight_copy))
    complain(op, "gathers from other ranks");
  if (in_place) {
    const bool trained_only = held_[op.buffer(Role::weights)].trained_only;
    Content wanted = weights(op.block, torn_home(op.block));
    wanted.trained_only = trained_only;
    need(op, Role::weights, wanted);
    --seen_uses_;
    put(op, Role::weights, weights(op.block, home(op.block)));
    held_[op.buffer(Role::weights)].trained_only = trained_only;
  } else {
    need(op, Role::weights_source, weights(op.block, home(op.block)));
    if (work_.coded_weight > 0) codes(op);
    put(op, Role::weights, weights(op.block, Extent::whole));
  }
}

/// A code per weight and a scale per 256 of them, each rank's in whole pages.
void Interpreter::codes(const Operation& op) {
  constexpr Bytes kPageBytes = 4096;
  pass(op, Role::workspace);
  const Bytes weights =
      part_of(work_.blocks[op.block].weight_bytes, home(op.block), op.block) / work_.coded_weight;
  const Bytes pages = (weights + weights / 64 + kPageBytes - 1) / kPageBytes;
  const BufferId buffer = op.buffer(Role::workspace);
  if (buffer == kNoBuffer) return;
  if (schedule_.buffers[buffer].bytes < group() * pages * kPageBytes) {
    complain(op, "has no room for the codes of all ranks");
  }
}

/// The embedding needs tokens, a layer the positions of packed documents.
void Interpreter::batch_of(const Operation& op) {
  if (!work_.is_embedding(op.block) && !work_.packed) return;
  need(op, Role::batch, {What::batch, 0, op.micro, run_});
}

/// The tiles of the embedding complete the activation one after the other.
void Interpreter::forward(const Operation& op) {
  if (work_.is_part_of_layer(op.block)) return tile_forward(op);
  current_weights_in_use(op, op.block);
  batch_of(op);
  if (!work_.is_embedding(op.block)) {
    need(op, Role::input, of_run(What::activation, op, op.micro));
    pass(op, Role::workspace);
    if (training_ && keeps(op)) {
      put(op, Role::intermediates, of_run(What::intermediates, op, op.micro));
    }
  } else if (op.block > 0) {
    need(op, Role::output, of_run(What::activation, op, op.micro));
    --seen_uses_;
  }
  put(op, Role::output, {What::activation, op.block + 1, op.micro, run_});
}

/// Adds a micro-batch to the sums of `block`. Those of a tied tile need not be cleared.
void Interpreter::add_to(const Operation& op, const Use& use, What what, std::uint32_t block) {
  ++seen_uses_;
  const Content before = {what, block, op.micro, run_};
  const bool cleared = what != What::tied_accumulator || op.micro > 0;
  if (cleared && held_[use.buffer] != before) {
    complain(op, fmt::format("adds to {}, not to {}", show(held_[use.buffer]), show(before)));
  }
  if (!use.writes) complain(op, "does not say that it writes sums");
  if (size(before) > schedule_.buffers[use.buffer].bytes) complain(op, "writes beyond its sums");
  held_[use.buffer] = {what, block, op.micro + 1, run_};
}

void Interpreter::clear(const Operation& op) {
  if (!is_trained(op.block)) complain(op, "clears sums of a frozen block");
  put(op, Role::accumulator, of_run(What::accumulator, op));
}

void Interpreter::backward(const Operation& op) {
  if (!work_.is_differentiated(op.block)) complain(op, "is below all that is trained");
  if (work_.is_part_of_layer(op.block)) {
    return work_.blocks[op.block].continues ? tile_backward(op) : norm_backward(op);
  }
  // Frozen tiles of the embedding leave it to the others.
  std::uint32_t above = op.block + 1;
  while (work_.is_embedding(above) && !is_trained(above)) ++above;
  need(op, Role::gradient_flow, {What::flow, above, op.micro, run_});
  --seen_uses_;
  batch_of(op);
  if (!work_.is_embedding(op.block)) {
    current_weights_in_use(op, op.block);
    need(op, Role::input, of_run(What::activation, op, op.micro));
    pass(op, Role::workspace);
    use_up_intermediates(op);
  }
  put(op, Role::gradient_flow, of_run(What::flow, op, op.micro));
  add_gradient(op);
}

/// The gradient of the weights of the operation's block, unless it is frozen.
void Interpreter::add_gradient(const Operation& op) {
  if (work_.is_differentiated(op.block) && is_trained(op.block)) {
    return add_to(op, op.use(Role::accumulator), What::accumulator, op.block);
  }
  if (op.buffer(Role::accumulator) != kNoBuffer) complain(op, "has sums of a frozen block");
}

/// Intermediates that are not kept are recomputed.
void Interpreter::use_up_intermediates(const Operation& op) {
  const BlockWork& block = work_.blocks[op.block];
  const double again = keeps(op) ? 0.0 : block.recomputed_flops;
  if (op.flops != 2.0 * block.forward_flops - block.frozen_flops + again)
    complain(op, "has the wrong FLOPs");
  if (!keeps(op)) return;
  need(op, Role::intermediates, of_run(What::intermediates, op, op.micro));
  --seen_uses_;
  put(op, Role::intermediates, {});
}

bool Interpreter::keeps(const Operation& op) const {
  return work_.is_layer(op.block) && !work_.is_part_of_layer(op.block) &&
         work_.is_differentiated(op.block) &&
         problem_.placement.blocks[op.block].keeps_intermediates;
}

void Interpreter::pack(const Operation& op) {
  need(op, Role::accumulator, of_run(What::accumulator, op, plan_->micro_batches));
  if (work_.trains_tied() && work_.is_embedding(op.block)) {
    need(op, Role::output_accumulator, of_run(What::tied_accumulator, op, plan_->micro_batches));
  }
  put(op, Role::gradient, of_run(What::packed, op));
  if (!several(op.block)) put(op, Role::statistics, of_run(What::statistics, op));
}

/// In place, or to this rank's shard.
void Interpreter::reduce(const Operation& op) {
  const bool in_place = op.buffer(Role::gradient_source) == kNoBuffer;
  need(op, in_place ? Role::gradient : Role::gradient_source, of_run(What::packed, op));
  if (in_place) {
    --seen_uses_;
    need_shard(op, Role::gradient, sums(op.block) == Extent::torn);
  }
  put(op, Role::gradient, gradient(op, run_, in_place ? sums(op.block) : Extent::shard));
  put(op, Role::statistics, of_run(What::statistics, op));
  pass(op, Role::workspace);
}

void Interpreter::offload_gradient(const Operation& op) {
  need_shard(op, Role::gradient_source, sums(op.block) == Extent::torn);
  need(op, Role::gradient_source, gradient(op, run_, sums(op.block)));
  put(op, Role::gradient, gradient(op, run_, own(op.block)));
}

void Interpreter::gate(const Operation& op) {
  need(op, Role::losses, {What::losses, 0, plan_->micro_batches, run_});
  put(op, Role::verdict, {What::verdict, 0, 0, run_});
  if (!training_) return;
  std::uint32_t block = 0;
  for (const Use& use : op.uses) {
    if (use.role == Role::routing) ++seen_uses_;
    if (use.role != Role::statistics) continue;
    ++seen_uses_;
    while (block < work_.blocks.size() && !is_trained(block)) ++block;
    if (held_[use.buffer] != Content{What::statistics, block++, 0, run_}) {
      complain(op, "judges statistics of another gradient");
    }
  }
  while (block < work_.blocks.size() && !is_trained(block)) ++block;
  if (block != work_.blocks.size()) complain(op, "does not judge every gradient");
}

Content Interpreter::weights(std::uint32_t block, Extent extent) const {
  return {What::weights, block, 0, updates_[block], extent};
}

/// While a block is updated, sub-group by sub-group, those that are done are one update ahead.
Content Interpreter::states(const Operation& op) const {
  const bool done = op.sub_group < updated_groups_[op.block];
  return {What::states, op.block, op.sub_group, updates_[op.block] + (done ? 1 : 0), own(op.block)};
}

Content Interpreter::of_run(What what, const Operation& op, std::uint32_t micro) const {
  return {what, op.block, micro, run_};
}

Content Interpreter::gradient(const Operation& op, std::uint64_t run, Extent extent) const {
  if (!several(op.block)) return {What::packed, op.block, 0, run};
  return {What::reduced, op.block, 0, run, extent};
}

void Interpreter::copy(const Operation& op, Role from, Role to, const Content& content) {
  need(op, from, content);
  put(op, to, content);
}

void Interpreter::current_weights_in_use(const Operation& op, std::uint32_t block) {
  Content wanted = weights(block, Extent::whole);
  wanted.decoded = work_.blocks[block].is_coded();
  need(op, Role::weights, wanted);
  if (updates_[block] != due_[block]) complain(op, "runs with weights of another step");
}

void Interpreter::need(const Operation& op, Role role, const Content& content) {
  const BufferId id = op.buffer(role);
  ++seen_uses_;
  if (id == kNoBuffer) return complain(op, "lacks " + show(content));
  if (held_[id] == content) return;
  complain(op, fmt::format("needs {}, finds {} in '{}'", show(content), show(held_[id]),
                           schedule_.buffers[id].name));
}

void Interpreter::need_shard(const Operation& op, Role role, bool shard) {
  if (op.use(role).shard != shard) complain(op, shard ? "takes the whole" : "takes just a shard");
}

void Interpreter::put(const Operation& op, Role role, const Content& content) {
  const auto use =
      std::find_if(op.uses.begin(), op.uses.end(), [role](const Use& u) { return u.role == role; });
  ++seen_uses_;
  if (use == op.uses.end()) return complain(op, "has no place for " + show(content));
  if (!use->writes) complain(op, "does not say that it writes " + show(content));
  const Buffer& buffer = schedule_.buffers[use->buffer];
  const bool home =
      (buffer.kind == Kind::weights || buffer.kind == Kind::states) && op.lane != Lane::writeback;
  const Bytes piece = op.bytes + (home ? op.offset : 0);
  if ((in_pieces_ ? piece : size_in(buffer, content)) > buffer.bytes) {
    complain(op, fmt::format("writes {} beyond '{}'", show(content), buffer.name));
  }
  held_[use->buffer] = content;
}

void Interpreter::pass(const Operation& op, Role role) {
  ++seen_uses_;
  if (op.buffer(role) == kNoBuffer) complain(op, "lacks a buffer");
}

void Interpreter::complain(const Operation& op, const std::string& what) {
  complaints_.push_back(fmt::format("run {} ({}): {} {}", run_, plan_->name,
                                    OperationNames(program_)(op.plain), what));
}

}  // namespace ballast::step::named
