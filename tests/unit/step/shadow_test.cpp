// Plans written from a step program equal those of the builder.

#include <algorithm>
#include <map>

#include <gtest/gtest.h>

#include "ballast/schedule/build.h"
#include "ballast/schedule/labels.h"

#include "src/schedule/layout.h"
#include "src/step/step_writer.h"
#include "tests/unit/schedule/random_workload.h"
#include "tests/unit/schedule/shape_of_workload.h"

namespace ballast::step {
namespace {

using schedule::BufferId;
using schedule::kNoBuffer;
using schedule::Operation;
using schedule::Plan;
using schedule::Problem;
using schedule::Use;

Problem random_case(std::uint64_t seed) {
  Problem made = seed % 4 == 3   ? schedule::random_problem_of_ranks(seed / 2)
                 : seed % 8 == 5 ? schedule::random_evaluation(seed)
                                 : schedule::random_problem(seed);
  schedule::Workload& work = made.workload;
  schedule::add_codes(work, seed);
  const schedule::Workload drawn = work;
  schedule::Dice dice(seed + 77);
  if (!work.cuts_layers() && work.head() > work.first_layer() && dice.pick(0, 3) == 0) {
    work.pairs_bytes = 96;
    work.first_differentiated = dice.pick32(work.first_layer(), work.head() - 1);
    work.tied_accumulator_bytes = 0;
    while (work.first_differentiated < work.head() &&
           work.blocks[work.first_differentiated].is_frozen()) {
      ++work.first_differentiated;
    }
    for (std::uint32_t b = 0; b < work.blocks.size(); ++b) {
      schedule::BlockWork& block = work.blocks[b];
      if (work.is_layer(b) && b >= work.first_differentiated) continue;
      block.accumulator_bytes = block.gradient_bytes = 0;
      block.sub_groups.clear();
      block.frozen_flops = block.forward_flops;
    }
    if (work.first_differentiated >= work.head()) work = drawn;
  }
  const bool routes = work.routing_bytes > 0;
  work.losses_bytes = work.micro_batches * (routes ? 24 : 8);
  return made;
}

std::string old_name(const std::string& name, const schedule::Workload& work,
                     const std::map<std::string, BufferId>& ids) {
  if (ids.contains(name)) return name;
  const auto number = [&](std::size_t after) { return name.substr(after); };
  if (name.starts_with("activations in transit ")) {
    return "input of " + work.blocks[work.head()].name + ", " + number(23);
  }
  if (name.starts_with("gradient accumulator ")) {
    const int c = std::stoi(number(21));
    if (work.tied) return "tied accumulator " + std::to_string(c - 1);
    return work.blocks[work.head() + c].name + " accumulator";
  }
  if (name.ends_with(" second accumulator")) {
    for (std::size_t b = 0; b < work.blocks.size(); ++b) {
      if (name == work.blocks[b].name + " second accumulator") {
        return "tied accumulator " + std::to_string(b);
      }
    }
  }
  return name;
}

struct Written {
  std::vector<std::string> text;
};

std::vector<std::string> lines_of(const Plan& plan, const std::vector<schedule::Buffer>& buffers,
                                  const model::StepProgram* program, bool d1, std::uint32_t head) {
  std::vector<std::string> lines;
  std::vector<std::uint32_t> number(plan.operations.size());
  std::uint32_t next = 0;
  const auto is_d1 = [&](const Operation& op) {
    return d1 && op.action == schedule::Action::clear && op.block == head;
  };
  for (std::size_t i = 0; i < plan.operations.size(); ++i) {
    number[i] = next;
    if (!is_d1(plan.operations[i])) ++next;
  }
  for (const Operation& op : plan.operations) {
    if (is_d1(op)) continue;
    std::uint32_t label = op.label;
    if (program != nullptr && op.action == schedule::Action::compute) {
      const model::Pass& pass = program->passes[op.label];
      label = schedule::label_of(pass.kernel, pass.reference > 0);
    } else if (program != nullptr && op.payload == schedule::Payload::value &&
               op.label != schedule::kNoLabel && buffers[op.uses[0].buffer].name != "losses on the device") {
      const model::StepValue& value = program->values[op.label];
      const model::ValueClass& of = program->classes[value.of];
      label = schedule::label_of(of.from_host                             ? schedule::MovedValue::batch
                                 : of.counts                              ? schedule::MovedValue::routing
                                 : of.slots == model::SlotRule::report    ? schedule::MovedValue::losses
                                                                          : schedule::MovedValue::activation);
    }
    std::vector<std::string> uses;
    for (const Use& use : op.uses) {
      uses.push_back(fmt::format("{}:{}:{}:{}", static_cast<int>(use.role),
                                 use.buffer == kNoBuffer ? "?" : buffers[use.buffer].name,
                                 use.writes, use.shard));
    }
    std::sort(uses.begin(), uses.end());
    std::vector<std::uint32_t> after;
    for (const auto id : op.after) {
      if (!is_d1(plan.operations[id])) after.push_back(number[id]);
    }
    std::sort(after.begin(), after.end());
    const auto condition = [](const schedule::Condition& c) {
      return fmt::format("{}/{}/{}", static_cast<int>(c.rows), c.micro, c.any_rank);
    };
    lines.push_back(fmt::format(
        "{} {} {} b{} m{} g{} lag{} label{} spec{} when{} unless{} idle{} speed{} like{} share{} "
        "bytes{} off{} flops{} traffic{} | {} | {}",
        to_string(op.lane), to_string(op.action), static_cast<int>(op.payload), op.block, op.micro,
        op.sub_group, op.lag, label, static_cast<int>(op.speculation), condition(op.condition),
        op.unless ? condition(*op.unless) : "-", op.clears_when_idle, static_cast<int>(op.speed),
        op.likelihood, op.token_share, op.bytes, op.offset, op.flops, op.traffic,
        fmt::join(uses, " "), fmt::join(after, ",")));
  }
  return lines;
}

TEST(Shadow, PlansOfAProgramEqualThoseOfTheBuilder) {
  std::size_t moved = 0;
  for (std::uint64_t seed = 0; seed < 4000; ++seed) {
    const Problem problem = random_case(seed);
    const schedule::Workload& work = problem.workload;
    const auto program =
        std::make_shared<const model::StepProgram>(model::write_program(schedule::shape_of(work)));
    const ValueTable table(program);
    const bool one_pass = schedule::in_one_pass(work, problem.placement);
    const bool trains = problem.options.purpose == schedule::Purpose::training;
    const ValueQuestion question = {
        .placement = problem.placement,
        .options = problem.options,
        .form = one_pass ? model::HeadForm::one_pass : model::HeadForm::visits,
        .step_micro_batches = work.micro_batches,
        .evaluation_micro_batches = work.evaluation_micro_batches,
        .ranks = work.world};
    struct List : schedule::BufferList {
      using BufferList::BufferList;
      using BufferList::buffers_;
    };
    List list(false);
    ValueSlots slots = add_values(table, question, list);
    const schedule::Layout layout =
        schedule::make_layout(work, problem.placement, problem.options);
    // The buffers of the values among those of the layout.
    std::map<std::string, BufferId> ids;
    for (BufferId id = 0; id < layout.buffers.size(); ++id) ids[layout.buffers[id].name] = id;
    // A second colour has a name of its own in the layout.
    for (std::size_t i = 0; i < layout.head_rows.size(); ++i) {
      if (layout.head_rows == layout.rows) break;
      ids[fmt::format("rows between tiles {}", layout.rows.size() + i)] = layout.head_rows[i];
    }
    std::vector<BufferId> to_old;
    for (const schedule::Buffer& buffer : list.buffers_) {
      const auto found = ids.find(old_name(buffer.name, work, ids));
      ASSERT_NE(found, ids.end()) << seed << ": " << buffer.name;
      const schedule::Buffer& old = layout.buffers[found->second];
      ASSERT_EQ(buffer.bytes, old.bytes) << seed << ": " << buffer.name;
      ASSERT_EQ(buffer.kind, old.kind) << seed << ": " << buffer.name;
      ASSERT_EQ(buffer.tier, old.tier) << seed << ": " << buffer.name;
      to_old.push_back(found->second);
    }
    const auto values = [&](const schedule::Buffer& b) {
      using schedule::Kind;
      return (b.kind == Kind::accumulators || b.kind == Kind::activations ||
              b.kind == Kind::intermediates ||
              (b.kind == Kind::batch && b.name.find("statistics") == std::string::npos &&
               b.name != "verdict"));
    };
    const auto count = static_cast<std::size_t>(
        std::count_if(layout.buffers.begin(), layout.buffers.end(), values));
    const auto own = static_cast<std::size_t>(
        std::count_if(list.buffers_.begin(), list.buffers_.end(), values));
    std::string missing;
    for (BufferId id = 0; id < layout.buffers.size(); ++id) {
      const bool there = std::find(to_old.begin(), to_old.end(), id) != to_old.end();
      if (values(layout.buffers[id]) && !there) missing += layout.buffers[id].name + ", ";
    }
    ASSERT_EQ(own, count) << seed << ": " << missing;
    const auto translate = [&](BufferId& id) {
      if (id != kNoBuffer) id = to_old[id];
    };
    const auto translate_all = [&](std::vector<std::vector<BufferId>>& lists) {
      for (auto& one : lists) std::for_each(one.begin(), one.end(), translate);
    };
    translate_all(slots.shared);
    translate_all(slots.on_host);
    translate_all(slots.of_ranks);
    translate_all(slots.own);
    for (auto* one : {&slots.counts, &slots.staging, &slots.sums}) {
      std::for_each(one->begin(), one->end(), translate);
    }
    translate(slots.report);
    translate(slots.report_on_host);

    const schedule::Schedule old = schedule::build(work, problem.placement, problem.options);
    const auto writer = [&](const std::string& name, std::uint32_t micro) {
      return StepWriter(name, table, question, slots, work, layout, micro);
    };
    const auto compare = [&](const Plan& before, const Plan& now) {
      auto expected = lines_of(before, layout.buffers, nullptr, false, work.head());
      auto found = lines_of(now, layout.buffers, program.get(), false, work.head());
      if (expected != found) {
        expected = lines_of(before, layout.buffers, nullptr, true, work.head());
        found = lines_of(now, layout.buffers, program.get(), true, work.head());
        ++moved;
      }
      for (std::size_t i = 0; i < std::min(expected.size(), found.size()); ++i) {
        ASSERT_EQ(found[i], expected[i])
            << "seed " << seed << " " << before.name << " operation " << i << " after\n"
            << (i > 0 ? found[i - 1] : "");
      }
      ASSERT_EQ(expected.size(), found.size()) << seed;
      ASSERT_EQ(before.leaves_updates, now.leaves_updates);
      ASSERT_EQ(before.applies_updates, now.applies_updates);
      ASSERT_EQ(before.gate == schedule::kNoOp, now.gate == schedule::kNoOp);
      if (!work.has_reference()) {
      ASSERT_EQ(before.first_head == schedule::kNoOp, now.first_head == schedule::kNoOp) << seed;
      }
    };
    if (trains) {
      ASSERT_NO_FATAL_FAILURE(
          compare(old.first, writer("first", work.micro_batches).training_step(false)));
      ASSERT_NO_FATAL_FAILURE(compare(
          old.steady,
          writer("steady", work.micro_batches).training_step(old.first.leaves_updates)));
      ASSERT_NO_FATAL_FAILURE(compare(
          schedule::build_partial_step(work, problem.placement, problem.options,
                                       (work.micro_batches + 1) / 2, true),
          writer("steady", (work.micro_batches + 1) / 2).training_step(true)));
      ASSERT_NO_FATAL_FAILURE(compare(old.flush, writer("flush", 0).flush()));
      ASSERT_NO_FATAL_FAILURE(compare(old.rollback, writer("rollback", 0).rollback()));
    }
    ASSERT_NO_FATAL_FAILURE(
        compare(old.evaluation, writer("evaluation", work.evaluation_micro_batches).evaluation()));
  }
  std::printf("moved clears: %zu\n", moved);
}

}  // namespace
}  // namespace ballast::step
