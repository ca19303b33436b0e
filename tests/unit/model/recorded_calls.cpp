#include "tests/unit/model/recorded_calls.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ballast/core/error.h"
#include "ballast/model/architecture.h"

#include "src/calibrate/timed_passes.h"

namespace ballast::model_net {
namespace {

using model::Kernel;
using model::Operand;
using model::Pass;
using model::PassArguments;
using model::Port;

/// The optional memory that a pass gets.
enum class KeptPart { nothing, all, attention };

constexpr std::string_view kSizes = "sizes";
constexpr std::string_view kBlocks = "blocks";

std::string_view form_of(const Pass& pass, KeptPart kept) {
  switch (pass.kernel) {
    case Kernel::embed:
    case Kernel::embed_backward:
      return "embedding";
    case Kernel::layer:
      return kept == KeptPart::nothing ? "layer" : kept == KeptPart::all ? "kept" : "known";
    case Kernel::layer_backward:
      return kept == KeptPart::nothing ? "backward"
             : kept == KeptPart::all   ? "backward_kept"
                                       : "backward_known";
    case Kernel::norm:
      return "norm";
    case Kernel::norm_backward:
      return "norm_backward";
    case Kernel::tile:
      return "tile";
    case Kernel::tile_backward:
      return "tile_backward";
    case Kernel::router:
    case Kernel::router_backward:
    case Kernel::router_losses:
      return "router";
    case Kernel::shared_expert:
    case Kernel::shared_expert_backward:
    case Kernel::expert:
    case Kernel::expert_backward:
    case Kernel::exchanged_expert:
    case Kernel::exchanged_expert_backward:
    case Kernel::result_norm:
    case Kernel::result_norm_backward:
      return "experts";
    default:
      return "head";
  }
}

class NoStream final : public device::Stream {
 public:
  void synchronize() override {}
};

class RecordingExchange final : public model::AllToAll {
 public:
  explicit RecordingExchange(test::CallLog& log) : log_(log) {}

  void exchange(device::Stream& /*stream*/, ConstDeviceBytes input,
                std::span<const Bytes> input_parts, DeviceBytes output,
                std::span<const Bytes> output_parts) override {
    log_.call("exchange", input.raw(), input.size(), fmt::format("{}", fmt::join(input_parts, "+")),
              output.raw(), output.size(), fmt::format("{}", fmt::join(output_parts, "+")));
  }

 private:
  test::CallLog& log_;
};

class Recorder {
 public:
  explicit Recorder(const RecordedModel& model)
      : model_(model),
        compute_(make_recording_compute(model.own, model.type, model.shape.micro_batch, model.mlp,
                                        log_)),
        program_(write_program(model.whole, model.type, model.shape, compute_->sizes())) {
    compute_->set_workspace(memory("WORKSPACE", compute_->sizes().workspace));
    for (const std::string_view form : form_names()) lists_.push_back({form, {}});
    const std::uint64_t experts = compute_->sizes().experts;
    moved_biases_.resize(experts);
    if (experts > 0) fill_routing(experts);
  }

  std::vector<CallList> all() {
    record_sizes();
    for (const Pass& pass : program_.passes) {
      if (is_between_ranks(pass.kernel)) continue;
      record(pass, KeptPart::nothing);
      for (const Operand& operand : pass.operands) {
        if (operand.optional && operand.port == Port::kept) record(pass, KeptPart::all);
        if (operand.optional && operand.port == Port::kept_attention) {
          record(pass, KeptPart::attention);
        }
      }
    }
    for (std::size_t b = 0; b < model_.own.blocks.size(); ++b) record_block(b);
    return std::move(lists_);
  }

 private:
  /// Uneven numbers of choices, the same for each micro-batch: those of the first expert are none
  /// on the first rank.
  void fill_routing(std::uint64_t experts) {
    const auto router = std::ranges::find(model_.own.blocks, model::BlockContent::router,
                                          &model::BlockSpec::content);
    if (router == model_.own.blocks.end()) return;
    const std::uint64_t choices = model_.shape.micro_batch.tokens();
    for (std::uint64_t rank = 0; rank < model_.shape.ranks; ++rank) {
      for (std::uint64_t e = 0; e <= experts; ++e) {
        const std::uint64_t part = rank == 0 ? (e < 2 ? 0 : e * e) : e * experts;
        routing_.push_back(static_cast<std::int32_t>(choices * part / (experts * experts)));
      }
    }
  }

  DeviceBytes memory(std::string_view name, Bytes bytes) { return {log_.region(name), bytes}; }

  std::vector<std::string>& lines_of(std::string_view form) {
    return std::ranges::find(lists_, form, &CallList::form)->lines;
  }
  void finish(std::string_view form, const std::string& title) {
    std::vector<std::string>& lines = lines_of(form);
    lines.push_back("== " + title);
    for (std::string& line : log_.take_lines()) lines.push_back(std::move(line));
  }

  void record_sizes() {
    const model::KernelSizes& sizes = compute_->sizes();
    log_.call("workspace", sizes.workspace);
    log_.call("rows", sizes.rows, sizes.sums, sizes.experts, sizes.router_totals);
    for (std::size_t b = 0; b < model_.own.blocks.size(); ++b) {
      log_.call(model_.own.blocks[b].name, sizes.intermediates[b], sizes.attention[b],
                sizes.cleared[b]);
    }
    finish(kSizes, "memory of kernels");
  }

  static bool is_bound(const Operand& operand, KeptPart kept) {
    if (operand.kind == model::OperandKind::workspace) return false;
    if (!operand.optional) return true;
    return operand.port == (kept == KeptPart::all ? Port::kept : Port::kept_attention) &&
           kept != KeptPart::nothing;
  }
  /// Name of the memory of an operand. Tiles of the output matrix have one each.
  static std::string name_of(const Operand& operand) {
    std::string name(to_string(operand.port));
    std::ranges::replace(name, ' ', '_');
    const bool several =
        operand.port == Port::output_weights || operand.port == Port::output_gradient;
    return several ? fmt::format("{}_{}", name, operand.number) : name;
  }

  PassArguments arguments_of(const Pass& pass, KeptPart kept) {
    const model::MicroBatchShape& shape = model_.shape.micro_batch;
    std::vector<DeviceBytes> bound;
    DeviceBytes batch;
    for (const Operand& operand : pass.operands) {
      bound.push_back(is_bound(operand, kept)
                          ? memory(name_of(operand),
                                   calibrate::bytes_of(operand, program_, model_.own, model_.type))
                          : DeviceBytes());
      if (operand.port == Port::batch) batch = bound.back();
    }
    PassArguments arguments = calibrate::bind_pass(pass, shape.tokens(), bound);
    arguments.batch = model::BatchViews::cut(batch, shape.tokens(), shape.slices);
    arguments.routing_counts = routing_;
    for (const Operand& operand : pass.operands) {
      if (operand.port == Port::all_routing_counts)
        arguments.all_routing_counts.push_back(routing_);
    }
    const bool corrects = model::correction_biases(model_.own.blocks[pass.block]) != nullptr;
    if (model_.later && corrects) arguments.correction_biases = moved_biases_;
    arguments.scalars = {
        .accumulation = model_.later ? model::Accumulation::later : model::Accumulation::first,
        .dropout = {.on = pass.reference == 0, .key = 7},
        .loss_gradient = 0.5F,
        .router_gradient = 0.25F,
        .shard = model_.shape.ranks - 1,
        .ranks = model_.shape.ranks};
    arguments.exchange = &exchange_;
    if (shape.slices > 1) arguments.sequence_slice = {1, &exchange_};
    return arguments;
  }

  [[nodiscard]] Bytes bytes_of_batch() const {
    for (const Operand& operand : program_.passes.front().operands) {
      if (operand.port == Port::batch) return program_.bytes_of(program_.values[operand.number]);
    }
    throw Error(ErrorCategory::state, "the first pass does not read the batch");
  }

  void record(const Pass& pass, KeptPart kept) {
    compute_->run(stream_, pass, arguments_of(pass, kept));
    finish(form_of(pass, kept),
           fmt::format("{} of {}{}{}", to_string(pass.kernel), model_.own.blocks[pass.block].name,
                       pass.number > 0 ? fmt::format(", number {}", pass.number) : "",
                       pass.reference > 0 ? ", reference" : ""));
  }

  /// Records what happens to the gradient and to the codes of a block.
  void record_block(std::size_t b) {
    const model::BlockSpec& block = model_.own.blocks[b];
    model::GradientSums sums;
    for (const model::GradientSum& sum : program_.sums) {
      if (sum.block != b) continue;
      const auto view = view_as<float>(memory(sum.clears ? "gradient" : "tied", sum.bytes));
      if (sum.clears) {
        sums.own = view;
        compute_->clear_gradient(stream_, b, view);
      } else {
        sums.tied = view;
      }
    }
    if (!sums.own.empty()) {
      const std::vector<model::BatchViews> batches = {model::BatchViews::cut(
          memory("batch", bytes_of_batch()), model_.shape.micro_batch.tokens(),
          model_.shape.micro_batch.slices)};
      sums.batches = batches;
      compute_->pack_gradient(stream_, b, sums,
                              memory("packed", block.own_trained_elements() * size_of(model_.type)),
                              view_as<GradientStats>(memory("stats", sizeof(GradientStats))));
    }
    if (block.quantized_elements > 0) {
      const model::BlockCodes codes(model_.own, block);
      compute_->decode_block(
          stream_, b, memory("stored", block.plain_elements() * size_of(model_.type) + codes.bytes),
          memory("weights", block.elements * size_of(model_.type)));
    }
    finish(kBlocks, block.name);
  }

  const RecordedModel& model_;
  test::CallLog log_;
  NoStream stream_;
  RecordingExchange exchange_{log_};
  std::unique_ptr<model::Compute> compute_;
  model::StepProgram program_;
  std::vector<CallList> lists_;
  std::vector<std::int32_t> routing_;
  std::vector<float> moved_biases_;
};

}  // namespace

const std::vector<std::string_view>& form_names() {
  static const std::vector<std::string_view> kNames = {
      kSizes,          "embedding",      "layer", "kept",          "known", "backward",
      "backward_kept", "backward_known", "tile",  "tile_backward", "norm",  "norm_backward",
      "router",        "experts",        "head",  kBlocks};
  return kNames;
}

std::vector<CallList> record_calls(const RecordedModel& model) {
  return Recorder(model).all();
}

}  // namespace ballast::model_net
