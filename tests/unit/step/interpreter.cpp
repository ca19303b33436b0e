#include "tests/unit/step/interpreter.h"

#include <algorithm>
#include <utility>

#include "ballast/step/labels.h"
#include "ballast/step/plans.h"
#include "ballast/step/problem.h"

#include "src/step/devices.h"
#include "tests/unit/step/device_faults.h"
#include "tests/unit/step/drawn_rows.h"
#include "tests/unit/step/moved_content.h"
#include "tests/unit/step/rank_part.h"
#include "tests/unit/step/serial_order.h"
#include "tests/unit/step/symbolic_memory.h"

namespace ballast::step {

using model::BufferRule;
using model::kNone;
using model::Operand;
using model::OperandAccess;
using model::OperandKind;

namespace {

constexpr model::ValueId kBatch = 0;  ///< the first value of every program

class Interpreter {
 public:
  Interpreter(const Problem& problem, const Placement& placement, const Options& options,
              const Schedule& schedule, std::uint64_t seed)
      : problem_(problem),
        program_(problem.program()),
        placement_(placement),
        options_(options),
        schedule_(schedule),
        rank_(problem),
        dealt_(deal(program_, problem.devices)),
        // Not the first rank, whose shards begin at 0.
        part_(problem, options.purpose == Purpose::training,
              schedule.ranks == 1 ? 0 : 1 + seed % (schedule.ranks - 1)),
        rows_(program_, schedule.ranks > 1, seed),
        training_order_(program_, program_.training, form_of(problem, placement)),
        evaluation_order_(program_, program_.evaluation, model::HeadForm::visits),
        memory_(schedule.buffers),
        updates_(problem.blocks.size(), 0),
        due_(problem.blocks.size(), 0),
        updated_groups_(problem.blocks.size(), 0) {
    // Device memory begins as zeros, and so does the end of states.
    for (std::uint32_t b = 0; b < schedule.state_home.size(); ++b) {
      for (std::uint32_t g = 0; g < schedule.state_home[b].size(); ++g) {
        const BufferId id = schedule.state_home[b][g];
        const Bytes zeros = problem.blocks[b].sub_groups[g].initial_state_bytes;
        const Bytes end = rank_.states(b, g);
        if (schedule.buffers[id].tier != Tier::device || zeros >= end) continue;
        memory_.write(id, {zeros, end, states_of(b, g, 0), zeros, true});
      }
    }
  }

  void run(const Plan& plan) {
    plan_ = &plan;
    ++run_;
    const bool training = plan.micro_batches > 0 && &plan != &schedule_.evaluation;
    order_ = training ? &training_order_ : &evaluation_order_;
    next_.assign(plan.micro_batches, 0);
    passed_.assign(order_->passes().size(), 0);
    additions_.assign(program_.sums.size(), 0);
    forget_what_passed();
    if (&plan == &schedule_.rollback) undo_speculative_updates();
    for (std::uint32_t m = 0; m < plan.micro_batches; ++m) {
      const Content batch = value_of(kBatch, m, kNone);
      memory_.write(schedule_.batch_host[m], {0, size_of(kBatch), batch, 0, true});
    }
    for (const Operation& op : plan.operations) {
      taken_ = 0;
      if (const auto fault = find_device_fault(op, schedule_, dealt_)) complain(op, *fault);
      perform(op);
      if (taken_ != op.uses.size()) complain(op, "uses what it does not need");
    }
    const auto complete = [&](std::uint32_t next) { return next == order_->passes().size(); };
    const bool gated = plan.micro_batches == 0 || decision_.second == run_;
    if (!gated || !std::all_of(next_.begin(), next_.end(), complete)) {
      complaints_.push_back(fmt::format("run {} ({}) lacks passes or a gate", run_, plan.name));
    }
    if (!training) return;
    last_training_run_ = run_;
    last_micro_batches_ = plan.micro_batches;
    for (std::uint32_t b = 0; b < due_.size(); ++b) due_[b] += was_touched(b) ? 1 : 0;
  }

  /// Every update is done, and all data is in its home.
  void finish() {
    ++run_;
    forget_what_passed();
    for (std::uint32_t b = 0; b < problem_.blocks.size(); ++b) {
      const Operation op = {.action = Action::read, .payload = Payload::weights, .block = b};
      const BufferId trained = schedule_.trained_home[b];
      const Bytes split = trained == kNoBuffer ? 0 : part_.trained_bytes(b);
      if (split > 0) need(op, {trained, 0, split}, weights_of(b, due_[b]));
      need(op, {schedule_.weight_home[b], 0, rank_.resident_weights(b) - split},
           weights_of(b, due_[b]), part_.kept_from(b) + split);
      for (std::uint32_t g = 0; is_trained(b) && g < schedule_.state_home[b].size(); ++g) {
        need(op, {schedule_.state_home[b][g], 0, rank_.states(b, g)}, states_of(b, g, due_[b]));
      }
    }
  }

  [[nodiscard]] const std::vector<std::string>& complaints() const { return complaints_; }

 private:
  using What = Content::What;
  using Range = BufferRange;
  void perform(const Operation& op) {
    if (is_idle(op)) return rest(op);
    switch (op.action) {
      case Action::compute:
      case Action::exchange:
        return compute(op);
      case Action::decode:
        return decode(op);
      case Action::clear:
        return clear(op);
      case Action::pack:
        return pack(op);
      case Action::upload:
      case Action::offload:
      case Action::fetch:
      case Action::writeback:
      case Action::transfer:
      case Action::keep:
        return move(op);
      case Action::gather:
        if (op.group == RankGroup::tensor) return gather_parts(op);
        return op.payload == Payload::value ? gather_counts(op) : gather_weights(op);
      case Action::reduce:
        return reduce(op);
      case Action::gate:
        return gate(op);
      case Action::update:
      case Action::update_on_device:
        return update(op);
      case Action::initialize:
        return initialize(op);
      case Action::read:
        return read(op);
      case Action::select:
        return select(op);
      case Action::scatter:
        return scatter(op);
    }
  }

  // Passes.

  /// A pass, or one that repeats a pass of the forward pass, binds its operands in order.
  void compute(const Operation& op) {
    taken_ = op.uses.size();
    const model::PassId id = pass_id(op);
    const std::uint32_t position =
        id < program_.passes.size() ? order_->position_of(id) : std::uint32_t{kNone};
    if (position == kNone) return complain(op, "belongs to no pass of this plan");
    check_order(op, id, position);
    const model::Pass& pass = program_.passes[id];
    std::vector<std::pair<const Operand*, const Use*>> bound;
    for (const Operand& operand : pass.operands) {
      if (!is_bound(program_, placement_, operand)) continue;
      const Use* use = bound.size() < op.uses.size() ? &op.uses[bound.size()] : nullptr;
      const bool writes = operand.access != OperandAccess::reads;
      if (use == nullptr || use->role != role_of(operand.port) || use->writes != writes) {
        return complain(op, fmt::format("does not bind {}", to_string(operand.port)));
      }
      bound.emplace_back(&operand, use);
    }
    if (bound.size() < op.uses.size()) complain(op, "binds what its pass does not have");
    if (op.block != pass.block || cost_of(op) != cost_of(program_, placement_, pass) ||
        op.token_share != pass.token_share) {
      complain(op, "has the cost of another pass");
    }
    for (const bool writes : {false, true}) {
      for (const auto& [operand, use] : bound) {
        if ((operand->access == OperandAccess::writes) != writes) continue;
        bind(op, *operand, use->buffer, position);
      }
    }
  }

  /// Only the backward pass repeats passes, those of the forward pass.
  void check_order(const Operation& op, model::PassId id, std::uint32_t position) {
    std::uint32_t& next = next_[op.micro];
    const bool more = next < order_->passes().size();
    if (more && order_->passes()[next] == id) {
      ++next;
      if (passed_[position]++ != op.micro) complain(op, "leaves the order of micro-batches");
    } else if (!more || position >= next || !order_->is_backward(next) ||
               order_->is_backward(position)) {
      complain(op, "is not in the order of passes");
    }
  }

  void bind(const Operation& op, const Operand& operand, BufferId buffer, std::uint32_t position) {
    const std::uint32_t number = operand.number;
    switch (operand.kind) {
      case OperandKind::value:
        return bind_value(op, operand, place_of(buffer, operand, op.micro), position);
      case OperandKind::gradient:
        return add(op, number, buffer);
      case OperandKind::workspace:
        if (op.device >= schedule_.devices || buffer != schedule_.workspace[op.device]) {
          complain(op, "has another workspace");
        }
        return;
      case OperandKind::rows:
        if (operand.access == OperandAccess::writes) {
          return put(op, {buffer, 0, program_.blocks[number].row_gradients},
                     rows_of(What::row_gradients, number, op.micro));
        }
        return need(op, {buffer, 0, program_.blocks[number].selected},
                    rows_of(What::rows, number, op.micro));
      case OperandKind::weights:
        break;
    }
    // An expert needs weights for rows alone. Rows of other ranks come to one that stays here.
    const model::StepBlock& block = program_.blocks[number];
    if (block.rows && !rows_.has_rows(number, op.micro, run_, block.per_rank)) return;
    const BlockSizes& sizes = problem_.blocks[number];
    if (!sizes.is_quantized()) {
      return need(op, {buffer, 0, sizes.weight_bytes}, weights_of(number, due_[number]));
    }
    need(op, {buffer, 0, sizes.dequantized_bytes}, {What::decoded, number, 0, due_[number]});
  }

  void bind_value(const Operation& op, const Operand& operand, const Range& place,
                  std::uint32_t position) {
    const model::ValueId id = operand.number;
    if (operand.port == model::Port::all_routing_counts) return need_counts(op, place.buffer, id);
    if (operand.access != OperandAccess::writes) {
      Content wanted = value_of(id, op.micro, order_->writer_before(position, id));
      if (is_distributed() && reads_host(operand)) wanted.what = What::counts;
      need(op, place, wanted);
    }
    if (operand.access == OperandAccess::reads) return;
    put(op, place, value_of(id, op.micro, position));
    // Nothing reads the result of the last pass.
    if (!order_->is_read(position, id)) memory_.read(place.buffer, place.begin, place.begin + 1);
  }

  /// Adds a micro-batch to a sum, which must hold all before it and nothing else.
  void add(const Operation& op, model::SumId sum, BufferId buffer) {
    const model::GradientSum& of = program_.sums[sum];
    const Range place = {buffer, 0, of.bytes};
    if (!rows_.has_rows_in_run(of.block, run_, plan_->micro_batches, true)) {
      memory_.read(buffer, 0, of.bytes);
      return;
    }
    std::uint32_t& additions = additions_[sum];
    if (of.clears || additions > 0) need(op, place, {What::sum, sum, 0, run_, additions});
    put(op, place, {What::sum, sum, 0, run_, ++additions});
  }

  void clear(const Operation& op) {
    const BufferId target = take(op, Role::target, true).buffer;
    for (model::SumId s = 0; s < program_.sums.size(); ++s) {
      const model::GradientSum& sum = program_.sums[s];
      if (sum.block != op.block || !sum.clears) continue;
      if (additions_[s] > 0) complain(op, "clears what has been added");
      if (op.traffic != sum.cleared) complain(op, "clears another part");
      return put(op, {target, 0, sum.bytes}, {What::sum, s, 0, run_});
    }
    complain(op, "clears sums of a frozen block");
  }

  void pack(const Operation& op) {
    for (model::SumId s = 0; s < program_.sums.size(); ++s) {
      const model::GradientSum& sum = program_.sums[s];
      if (sum.block != op.block) continue;
      const Use use = take(op, sum.clears ? Role::source : Role::added_gradient, false);
      need(op, {use.buffer, 0, sum.bytes},
           {What::sum, s, 0, run_, training_order_.additions_to(s) * plan_->micro_batches});
      if (sum.by_token) need_batches(op);
    }
    const Use target = take(op, Role::target, true);
    put(op, {target.buffer, 0, rank_.padded_gradient(op.block)}, gradient(op, Sums::kOfRank));
    if (!rank_.is_distributed(op.block)) put_statistics(op);
  }

  /// Needs the batches of all micro-batches, in order.
  void need_batches(const Operation& op) {
    std::uint32_t micro = 0;
    for (const Use& use : op.uses) {
      if (use.role != Role::tokens) continue;
      need(op, {use.buffer, 0, size_of(kBatch)}, value_of(kBatch, micro++, kNone));
    }
    taken_ += micro;
    if (micro != plan_->micro_batches) complain(op, "lacks micro-batches");
  }

  void put_statistics(const Operation& op) {
    put(op, {take(op, Role::statistics, true).buffer, 0, problem_.statistics_bytes},
        {What::statistics, op.block, 0, run_});
  }

  /// In place, or to this rank's shard.
  void reduce(const Operation& op) {
    const bool in_place = op.buffer(Role::source) == kNoBuffer;
    const Use target = take(op, Role::target, true);
    const BufferId source = in_place ? target.buffer : take(op, Role::source, false).buffer;
    if (target.shard != (in_place && rank_.shards_states(op.block))) {
      complain(op, "leaves the sum in another part");
    }
    take(op, Role::scratch, true);
    need(op, {source, 0, rank_.padded_gradient(op.block)}, gradient(op, Sums::kOfRank));
    const Bytes own = part_.gradient_from(op.block);
    put(op, {target.buffer, in_place ? own : 0, rank_.updated_gradient(op.block)},
        gradient(op, Sums::kOfAllRanks), own);
    put_statistics(op);
  }

  void gate(const Operation& op) {
    const BufferId losses = take(op, Role::losses, false).buffer;
    decision_ = {take(op, Role::decision, true).buffer, run_};
    if (!memory_.has_no_bytes(decision_.first)) complain(op, "decides where data are");
    auto use = op.uses.begin();
    const auto next_of = [&](Role role) {
      use = std::find_if(use, op.uses.end(), [role](const Use& one) { return one.role == role; });
      ++taken_;
      return use == op.uses.end() ? kNoBuffer : (use++)->buffer;
    };
    const bool training = order_ == &training_order_;
    for (std::uint32_t b = 0; training && b < problem_.blocks.size(); ++b) {
      if (!is_trained(b)) continue;
      const Range place = {next_of(Role::statistics), 0, problem_.statistics_bytes};
      need(op, place, {What::statistics, b, 0, run_});
    }
    for (model::ValueId v = 0; v < program_.values.size(); ++v) {
      if (training && class_of(v).counts) need_counts(op, next_of(Role::counts), v);
      const std::uint32_t writer = order_->last_writer(v);
      if (class_of(v).buffers != BufferRule::report || writer == kNone) continue;
      for (std::uint32_t m = 0; m < plan_->micro_batches; ++m) {
        need(op, place_of(losses, {.number = v}, m), value_of(v, m, writer));
      }
    }
  }

  /// Copies bytes as the engine does.
  void move(const Operation& op) {
    const bool again = op.speculation == Speculation::redoes && op.action == Action::fetch;
    const Role undo = op.payload == Payload::states ? Role::undo_states : Role::undo_weights;
    const Use source = take(op, again ? undo : Role::source, false);
    const Use target = take(op, Role::target, true);
    if (source.buffer == kNoBuffer || target.buffer == kNoBuffer) return;
    // A speculative writeback leaves the values before it in the other slot.
    if (op.action == Action::writeback && op.speculation == Speculation::speculates) {
      const BufferId other = take(op, undo, true).buffer;
      if (other != kNoBuffer) memory_.exchange(target.buffer, other);
    }
    const Range from = part_.home(op, source, op.bytes, schedule_);
    const Range to = part_.home(op, target, op.bytes, schedule_);
    const auto pieces = memory_.read(from.buffer, from.begin, from.begin + from.bytes);
    const bool right = !pieces.empty() && pieces.front().begin == from.begin &&
                       belongs(op, program_, pieces.front().content, run_of(op));
    if (!right) complain(op, "moves something else than it says");
    // A move empties its source.
    put(op, to, {});
    const bool pages = op.payload == Payload::value &&
                       (op.action == Action::fetch || op.action == Action::writeback);
    for (const SymbolicMemory::Piece& piece : pieces) {
      // The end of the last page has what was in the buffer before.
      if (pages && piece.content != pieces.front().content) continue;
      const Bytes begin = to.begin + (piece.begin - from.begin);
      put(op, {to.buffer, begin, piece.end - piece.begin}, piece.content, piece.at);
    }
  }

  void gather_weights(const Operation& op) {
    const bool in_place = op.buffer(Role::source) == kNoBuffer;
    const RankGroup all = rank_.shards_weights(op.block) ? RankGroup::same_share : RankGroup::all;
    if (op.group != (in_place ? all : RankGroup::weight_copy)) {
      complain(op, "gathers from other ranks");
    }
    const Content current = weights_of(op.block, updates_[op.block]);
    const BufferId target = take(op, Role::target, true).buffer;
    const Bytes kept = part_.kept_from(op.block);
    if (in_place) {
      const Bytes own = part_.updated_from(op.block);
      need(op, {target, own - kept, rank_.updated_weights(op.block)}, current, own);
      memory_.read(target, 0, rank_.trained_weights(op.block));
      return put(op, {target, 0, rank_.trained_weights(op.block)}, current, kept);
    }
    need(op, {take(op, Role::source, false).buffer, 0, rank_.resident_weights(op.block)}, current,
         kept);
    if (rank_.quantizes_gathers()) {
      const BufferId codes = take(op, Role::scratch, true).buffer;
      const bool fits =
          codes != kNoBuffer && memory_.has_room(codes, rank_.gathered_codes(op.block));
      if (!fits) complain(op, "has no room for the codes of all ranks");
    }
    put(op, {target, 0, rank_.padded_weights(op.block)}, current);
  }

  /// Completes an input from the parts of all tensor places. This rank has the first.
  void gather_parts(const Operation& op) {
    const BufferId target = take(op, Role::target, true).buffer;
    const bool apart = op.buffer(Role::source) != kNoBuffer;
    const auto pieces = memory_.read(apart ? take(op, Role::source, false).buffer : target, 0, 1);
    const bool right = !pieces.empty() && belongs(op, program_, pieces.front().content, run_of(op));
    const Bytes whole = right ? size_of(pieces.front().content.number) : 1;
    const Bytes part = round_up((whole - 1) / problem_.tensor + 1, kPage);
    if (!right || op.bytes != (problem_.tensor - 1) * part) complain(op, "gathers something else");
    put(op, {target, 0, whole}, pieces.empty() ? Content() : pieces.front().content);
  }

  void gather_counts(const Operation& op) {
    const BufferId target = take(op, Role::target, true).buffer;
    const auto pieces = memory_.read(take(op, Role::source, false).buffer, 0, 1);
    if (pieces.empty() || !belongs(op, program_, pieces.front().content, run_of(op))) {
      return complain(op, "gathers something else");
    }
    Content all = pieces.front().content;
    all.what = What::counts;
    put(op, {target, 0, schedule_.ranks * size_of(all.number)}, all);
  }

  void decode(const Operation& op) {
    const BlockSizes& sizes = problem_.blocks[op.block];
    need(op, {take(op, Role::source, false).buffer, 0, sizes.weight_bytes},
         weights_of(op.block, updates_[op.block]));
    put(op, {take(op, Role::target, true).buffer, 0, sizes.dequantized_bytes},
        {What::decoded, op.block, 0, updates_[op.block]});
  }

  /// A visitor makes the first values, or looks at those that are there, piece by piece.
  void initialize(const Operation& op) {
    if (updates_[op.block] > 0) complain(op, "comes after updates");
    const Range place = {take(op, Role::target, true).buffer, 0, op.bytes};
    if (op.payload == Payload::gradient || op.payload == Payload::value) return put(op, place, {});
    const auto [content, at] = visited(op, 0);
    put(op, place, content, at);
  }
  void read(const Operation& op) {
    const auto [content, at] = visited(op, due_[op.block]);
    need(op, {take(op, Role::source, false).buffer, 0, op.bytes}, content, at);
  }
  [[nodiscard]] std::pair<Content, Bytes> visited(const Operation& op, std::uint64_t done) const {
    if (op.payload == Payload::states) return {states_of(op.block, op.sub_group, done), op.offset};
    return {weights_of(op.block, done), part_.kept_from(op.block) + op.offset};
  }

  /// Rows of the current weights for the tokens of a micro-batch.
  void select(const Operation& op) {
    const BufferId tokens = take(op, Role::tokens, false).buffer;
    if (tokens != schedule_.batch_host[op.micro]) complain(op, "selects rows of other tokens");
    need(op, {take(op, Role::source, false).buffer, 0, rank_.resident_weights(op.block)},
         weights_of(op.block, due_[op.block]));
    put(op, {take(op, Role::target, true).buffer, 0, program_.blocks[op.block].selected},
        rows_of(What::rows, op.block, op.micro));
  }
  /// The gradients of all micro-batches' rows, each with its tokens, to the packed gradient.
  void scatter(const Operation& op) {
    put(op, {take(op, Role::target, true).buffer, 0, rank_.padded_gradient(op.block)},
        gradient(op, Sums::kOfRank));
    if (!rank_.is_distributed(op.block)) put_statistics(op);
    need_batches(op);
    std::uint32_t micro = 0;
    for (const Use& use : op.uses) {
      const Range rows = {use.buffer, 0, program_.blocks[op.block].row_gradients};
      if (use.role != Role::source) continue;
      need(op, rows, rows_of(What::row_gradients, op.block, micro++));
    }
    taken_ += micro;
  }
  [[nodiscard]] Content rows_of(What what, std::uint32_t table, std::uint32_t micro) const {
    return {what, table, micro, due_[table], static_cast<std::uint32_t>(run_)};
  }

  /// Drops data in transit. Only states that were fetched before their update reach the next run.
  void forget_what_passed() {
    memory_.for_all([this](BufferId id, SymbolicMemory::Piece& piece) {
      const Kind kind = schedule_.buffers[id].kind;
      const bool states = piece.content.what == What::states;
      const bool ahead = states && (!piece.read || program_.blocks[piece.content.number].rows);
      const bool stays = kind == Kind::gradients || ahead;
      if (stays || (!is_in_transit(schedule_.buffers[id]) && kind != Kind::workspace)) return;
      if (!piece.read) {
        complaints_.push_back(fmt::format("before run {} nobody has read {} in '{}'", run_,
                                          show(piece.content), schedule_.buffers[id].name));
      }
      piece.content = {};
      piece.read = true;
    });
  }

  // Updates.

  /// Turns the weights and states of a sub-group into those after one more update.
  void update(const Operation& op) {
    if (!is_trained(op.block)) return complain(op, "updates a frozen block");
    const std::uint32_t done = updated_groups_[op.block];
    if (op.sub_group != done) return complain(op, "is not in the order of sub-groups");
    const bool speculates = op.speculation != Speculation::none;
    const bool late = op.lag > 0 && plan_ != &schedule_.rollback;  // as in gated plans
    if (speculates != placement_.blocks[op.block].speculates && (speculates || !late))
      complain(op, "is another kind of update");
    const Use weights_use = take(op, Role::weights, true);
    const Use states_use = take(op, Role::states, true);
    const Use gradient_use = take(op, Role::gradient, false);
    if (std::max({weights_use.buffer, states_use.buffer, gradient_use.buffer}) == kNoBuffer) return;
    const Range weights = part_.home(op, weights_use, rank_.updated_weights(op.block), schedule_);
    const Range states = {states_use.buffer, 0, rank_.states(op.block, done)};
    const std::uint64_t version = updates_[op.block];
    const Content old_states = states_of(op.block, done, version);
    const Bytes from = part_.updated_from(op.block);
    const std::uint32_t after = (done + 1) % problem_.blocks[op.block].sub_groups.size();
    const BufferId undo_weights = undo_of(op, Role::undo_weights);
    const BufferId undo_states = undo_of(op, Role::undo_states);
    const Range copy = {undo_weights, 0, weights.bytes};
    // Old values in host memory return to the place of the update; on NVMe they were fetched there.
    if (op.speculation == Speculation::redoes && undo_weights != kNoBuffer) {
      need(op, copy, weights_of(op.block, version), from);
      memory_.read(weights.buffer, weights.begin, weights.begin + weights.bytes);
      put(op, weights, weights_of(op.block, version, done), from);
    }
    if (op.speculation == Speculation::redoes && undo_states != kNoBuffer) {
      need(op, {undo_states, 0, states.bytes}, old_states);
      put(op, states, old_states);
    }
    need(op, weights, weights_of(op.block, version, done), from);
    need(op, states, old_states);
    need(op, part_.home(op, gradient_use, rank_.updated_gradient(op.block), schedule_),
         gradient(op, rank_.is_distributed(op.block) ? Sums::kOfAllRanks : Sums::kOfRank),
         part_.gradient_from(op.block));
    need_permission(op);
    // The copy of the weights is complete after the last sub-group.
    if (op.speculation == Speculation::speculates && undo_weights != kNoBuffer) {
      if (done > 0) need(op, copy, weights_of(op.block, version, done), from);
      put(op, copy, weights_of(op.block, version, after), from);
    }
    if (op.speculation == Speculation::speculates) {
      put(op, {undo_states, 0, states.bytes}, old_states);
    }
    put(op, states, states_of(op.block, done, version + 1));
    put(op, weights, weights_of(op.block, version + (after == 0 ? 1 : 0), after), from);
    updated_groups_[op.block] = after;
    updates_[op.block] += after == 0 ? 1 : 0;
  }

  /// The buffer for values before a speculative update. On NVMe they stay in another slot.
  BufferId undo_of(const Operation& op, Role role) {
    if (op.speculation == Speculation::none) return kNoBuffer;
    const BlockPlacement& place = placement_.blocks[op.block];
    const bool trained = schedule_.trained_home[op.block] != kNoBuffer;
    const bool nvme = role == Role::undo_states ? place.optimizer == Tier::nvme
                                                : place.weights == Tier::nvme &&
                                                      (!trained || place.optimizer == Tier::nvme);
    return nvme ? kNoBuffer : take(op, role, op.speculation == Speculation::speculates).buffer;
  }

  /// The verdict, or its own block's statistics (eager); a speculative update waits for none.
  void need_permission(const Operation& op) {
    if (op.speculation == Speculation::speculates) return;
    if (options_.update == Update::gated) {
      const BufferId decision = take(op, Role::decision, false).buffer;
      if (decision_ != std::pair(decision, run_of(op))) complain(op, "comes before the verdict");
      return;
    }
    need(op, {take(op, Role::statistics, false).buffer, 0, problem_.statistics_bytes},
         {What::statistics, op.block, 0, run_of(op)});
  }

  /// At the start of a rollback the results of speculative updates are wrong wherever they are.
  void undo_speculative_updates() {
    for (std::uint32_t b = 0; b < problem_.blocks.size(); ++b) {
      if (!placement_.blocks[b].speculates || !was_touched(b)) continue;
      memory_.for_all([&](BufferId, SymbolicMemory::Piece& piece) {
        Content& content = piece.content;
        if (!is_updated(content) || content.number != b || content.version != updates_[b]) return;
        content.version |= Content::kUndone;
      });
      --updates_[b];
    }
  }

  // Conditions. A draw decides which experts have rows, so plans are run with many choices.

  /// Whether the last training step updates the block.
  [[nodiscard]] bool was_touched(std::uint32_t block) const {
    return is_trained(block) &&
           (options_.expert_updates == ExpertUpdates::all ||
            rows_.has_rows_in_run(block, last_training_run_, last_micro_batches_, true));
  }

  /// The rows of the first micro-batches (0: of all) are known on the host.
  void need_counts(const Operation& op, BufferId buffer, model::ValueId routing,
                   std::uint32_t micros = 0) {
    if (micros == 0) micros = plan_->micro_batches;
    for (std::uint32_t m = 0; m < micros; ++m) {
      Content wanted = value_of(routing, m, order_->last_writer(routing));
      if (is_distributed()) wanted.what = What::counts;
      need(op, place_of(buffer, {.number = routing}, m), wanted);
    }
  }

  bool holds(const Operation& op, const Condition& condition) {
    if (condition.always()) return true;
    if (condition.rows == Condition::Rows::in_step_before) {
      return last_training_run_ > 0 && last_training_run_ + 1 == run_ &&
             rows_.has_rows_in_run(op.block, last_training_run_, last_micro_batches_,
                                   condition.any_rank);
    }
    const std::optional<model::RowCount>& rows = program_.blocks[op.block].rows;
    if (!rows) return complain(op, "counts rows of a block that has none"), true;
    const bool one = condition.rows == Condition::Rows::in_micro_batch;
    const std::uint32_t micros = one ? condition.micro + 1 : plan_->micro_batches;
    need_counts(op, op.buffer(Role::counts), rows->routing, micros);
    return one ? rows_.has_rows(op.block, condition.micro, run_, condition.any_rank)
               : rows_.has_rows_in_run(op.block, run_, micros, condition.any_rank);
  }

  bool is_idle(const Operation& op) {
    const bool wanted = holds(op, op.condition);
    const bool there = op.unless && holds(op, *op.unless);
    if (op.condition.reads_routing() || (op.unless && op.unless->reads_routing())) ++taken_;
    const bool together = op.lane == Lane::gather || op.lane == Lane::reduce;
    if (together && !op.condition.always() && !op.condition.any_rank) {
      complain(op, "depends on the rows of one rank");
    }
    return !wanted || there;
  }

  /// Performs an operation without work: without rows the gradient is zero.
  void rest(const Operation& op) {
    taken_ = op.uses.size();
    if (!op.clears_when_idle) return;
    const BufferId target = op.buffer(Role::target);
    if (op.payload == Payload::statistics) {
      return put(op, {target, 0, op.bytes}, {What::statistics, op.block, 0, run_of(op)});
    }
    if (op.payload != Payload::gradient) return put(op, {target, 0, op.bytes}, {});
    const bool whole = op.action == Action::pack;
    const Bytes bytes = whole ? rank_.padded_gradient(op.block) : rank_.updated_gradient(op.block);
    put(op, {target, 0, bytes}, gradient(op, Sums::kZeros),
        whole ? 0 : part_.gradient_from(op.block));
  }

  [[nodiscard]] bool is_distributed() const { return schedule_.ranks > 1; }
  [[nodiscard]] bool is_trained(std::uint32_t block) const { return part_.is_trained(block); }
  [[nodiscard]] std::uint64_t run_of(const Operation& op) const {
    return op.lag == 0 ? run_ : last_training_run_;
  }
  [[nodiscard]] const model::ValueClass& class_of(model::ValueId value) const {
    return program_.classes[program_.values[value].of];
  }
  [[nodiscard]] Bytes size_of(model::ValueId value) const {
    return program_.bytes_of(program_.values[value]);
  }
  [[nodiscard]] bool reads_host(const Operand& operand) const {
    return class_of(operand.number).counts && operand.access == OperandAccess::reads;
  }

  [[nodiscard]] Content value_of(model::ValueId value, std::uint32_t micro,
                                 std::uint32_t writer) const {
    return {What::value, value, micro, run_, writer};
  }
  [[nodiscard]] Content gradient(const Operation& op, std::uint32_t by) const {
    return {What::gradient, op.block, 0, run_of(op), by};
  }

  /// A value of a micro-batch in a buffer that it may share with those of others.
  [[nodiscard]] Range place_of(BufferId buffer, const Operand& operand, std::uint32_t micro) const {
    const Bytes bytes = size_of(operand.number);
    if (reads_host(operand)) {
      return {buffer, micro * schedule_.ranks * bytes, schedule_.ranks * bytes};
    }
    if (class_of(operand.number).buffers != BufferRule::report) return {buffer, 0, bytes};
    // Values of the first class come first, for each micro-batch.
    Bytes before = 0;
    for (model::ClassId c = 0; c < program_.values[operand.number].of; ++c) {
      if (program_.classes[c].buffers == BufferRule::report) before += program_.classes[c].bytes;
    }
    return {buffer, problem_.micro_batches * before + micro * bytes, bytes};
  }

  /// The argument of an operation.
  Use take(const Operation& op, Role role, bool writes) {
    ++taken_;
    const Use use = op.use(role);
    if (use.buffer == kNoBuffer) complain(op, "lacks an argument");
    if (use.writes != writes) complain(op, "does not say what it writes");
    return use;
  }

  /// `at`: of the first byte in the content.
  void need(const Operation& op, const Range& range, const Content& content, Bytes at = 0) {
    if (range.buffer == kNoBuffer) return complain(op, "lacks " + show(content));
    const Bytes end = range.begin + range.bytes;
    Bytes reached = range.begin;
    for (const SymbolicMemory::Piece& piece : memory_.read(range.buffer, range.begin, end)) {
      const bool right = piece.begin == reached && piece.at == at + (reached - range.begin) &&
                         piece.content == expected(content, piece);
      if (!right) {
        return complain(op, fmt::format("needs {}, finds {} in '{}'", show(content),
                                        show(piece.content), schedule_.buffers[range.buffer].name));
      }
      reached = piece.end;
    }
    if (reached == end) return;
    complain(op, fmt::format("needs {}, of which '{}' lacks a part", show(content),
                             schedule_.buffers[range.buffer].name));
  }

  /// Frozen weights have no versions. A gradient of no rows is one of a rank, and of all ranks.
  [[nodiscard]] Content expected(Content content, const SymbolicMemory::Piece& found) const {
    const bool weights = content.what == What::weights;
    if (weights && found.at >= part_.trained_bytes(content.number))
      return weights_of(content.number, 0);
    if (content.what == What::gradient && found.content.by == Sums::kZeros)
      content.by = Sums::kZeros;
    return content;
  }

  void put(const Operation& op, const Range& range, const Content& content, Bytes at = 0) {
    if (range.buffer == kNoBuffer || range.bytes == 0) return;
    const Bytes end = range.begin + range.bytes;
    if (content.what == What::weights) {
      const Bytes trained = part_.trained_bytes(content.number);
      if (at < trained && trained < at + range.bytes) {
        const Bytes first = trained - at;
        put(op, {range.buffer, range.begin, first}, content, at);
        return put(op, {range.buffer, range.begin + first, range.bytes - first}, content, trained);
      }
    }
    SymbolicMemory::Piece piece = {range.begin, end, content, at};
    piece.content = expected(content, piece);
    // Nobody reads what came for rows that a router has sent elsewhere.
    piece.read = content.what == What::zeros || program_.blocks[op.block].rows.has_value();
    if (!memory_.has_room(range.buffer, end)) {
      complain(op, fmt::format("writes {} beyond '{}'", show(content),
                               schedule_.buffers[range.buffer].name));
    }
    const auto unread = memory_.write(range.buffer, piece);
    if (unread && is_in_transit(schedule_.buffers[range.buffer])) {
      complain(op, fmt::format("replaces {} in '{}', which nobody has read", show(*unread),
                               schedule_.buffers[range.buffer].name));
    }
  }

  void complain(const Operation& op, const std::string& what) {
    complaints_.push_back(
        fmt::format("run {} ({}): {} {}", run_, plan_->name, OperationNames(problem_)(op), what));
  }

  const Problem& problem_;
  const model::StepProgram& program_;
  const Placement& placement_;
  const Options& options_;
  const Schedule& schedule_;
  RankSizes rank_;
  std::vector<std::uint8_t> dealt_;  ///< by block
  RankPart part_;
  DrawnRows rows_;
  SerialOrder training_order_;
  SerialOrder evaluation_order_;
  SymbolicMemory memory_;
  std::vector<std::string> complaints_;

  std::vector<std::uint64_t> updates_;         ///< number per whole block
  std::vector<std::uint64_t> due_;             ///< by the training steps before the current run
  std::vector<std::uint32_t> updated_groups_;  ///< by block: in the update that is under way
  std::uint64_t run_ = 0;
  std::uint64_t last_training_run_ = 0;
  std::uint32_t last_micro_batches_ = 0;  ///< micro-batches of that run
  /// Buffer and run of the last gate.
  std::pair<BufferId, std::uint64_t> decision_ = {kNoBuffer, 0};

  // The current run.
  const Plan* plan_ = nullptr;
  const SerialOrder* order_ = nullptr;
  std::vector<std::uint32_t> next_;       ///< by micro-batch: position of the next pass
  std::vector<std::uint32_t> passed_;     ///< by position: micro-batches
  std::vector<std::uint32_t> additions_;  ///< by sum
  std::size_t taken_ = 0;                 ///< arguments of the current operation
};

}  // namespace

std::vector<std::string> find_faults(const Problem& problem, const Placement& placement,
                                     const Options& options, const Schedule& schedule,
                                     const std::vector<const Plan*>& runs, std::uint64_t seed) {
  Interpreter interpreter(problem, placement, options, schedule, seed);
  for (const Plan* plan : runs) {
    interpreter.run(*plan);
    if (!interpreter.complaints().empty()) return interpreter.complaints();
  }
  interpreter.finish();
  return interpreter.complaints();
}

}  // namespace ballast::step
