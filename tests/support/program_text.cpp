#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "tests/support/step_programs.h"

namespace ballast::model {
namespace {

constexpr std::string_view kLegend =
    R"(# The description of a step, as a model writes it for one micro-batch: no devices, no order of
# micro-batches, no placement. All micro-batches go through the passes of a stop before the next.
#
# Each pass: its stop, kernel, block and cost, then its arguments. Passes with the same number after
# "kernels" run the same kernels.
#   <   read          >   written: a new life begins     <>  read and written
#   ?   only if the placement keeps it                   =   the gradients that are complete
)";

/// Maximum width of an argument list, in characters.
constexpr std::size_t kWidth = 84;

/// Formats a number as "1,234,567".
std::string grouped(double number) {
  const std::string digits = fmt::format("{:.0f}", std::round(number));
  std::string text;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}
std::string grouped(Bytes number) {
  return grouped(static_cast<double>(number));
}

std::string_view to_string(BufferRule rule) {
  constexpr std::array<std::string_view, 5> kNames = {"own", "in turn", "scratch", "step",
                                                      "report"};
  return kNames[static_cast<std::size_t>(rule)];
}

std::string_view to_string(MemoryKind line) {
  constexpr std::array<std::string_view, 3> kNames = {"activations", "intermediates", "batch"};
  return kNames[static_cast<std::size_t>(line)];
}

std::string_view to_string(HeadForm form) {
  constexpr std::array<std::string_view, 3> kNames = {"", "one pass", "visits"};
  return kNames[static_cast<std::size_t>(form)];
}

class ProgramText {
 public:
  explicit ProgramText(const StepProgram& program) : program_(program) {
    for (const StepBlock& block : program.blocks) {
      width_ = std::max(width_, block.name.size());
    }
  }

  std::string write() {
    text_ = kLegend;
    blocks();
    classes();
    values();
    sums();
    head();
    recipes();
    const auto back = std::find_if(program_.training.begin(), program_.training.end(),
                                   [](const Stop& stop) { return stop.backward; });
    title("training: forward");
    list_stops({program_.training.begin(), back}, 0);
    title("training: backward");
    list_stops({back, program_.training.end()}, back - program_.training.begin());
    title("evaluation");
    list_stops(program_.evaluation, 0);
    return std::move(text_);
  }

 private:
  template <class... Parts>
  void line(fmt::format_string<Parts...> format, Parts&&... parts) {
    fmt::format_to(std::back_inserter(text_), format, std::forward<Parts>(parts)...);
    text_.resize(text_.find_last_not_of(' ') + 1);
    text_ += '\n';
  }
  void title(std::string_view name) { line("\n{}", name); }

  [[nodiscard]] const std::string& name_of(BlockId block) const {
    return program_.blocks[block].name;
  }
  /// Returns names of blocks, separated by commas.
  [[nodiscard]] std::string names_of(const std::vector<BlockId>& blocks) const {
    std::string names;
    for (const BlockId block : blocks) {
      names += fmt::format("{}{}", names.empty() ? "" : ", ", name_of(block));
    }
    return names;
  }

  void blocks() {
    title("blocks");
    for (const StepBlock& block : program_.blocks) {
      if (!block.rows) {
        const std::string table =
            block.selected == 0
                ? ""
                : fmt::format("table, {} bytes of rows per micro-batch{}", grouped(block.selected),
                              block.row_gradients == 0 ? ""
                                                       : fmt::format(", {} of their gradient",
                                                                     grouped(block.row_gradients)));
        line("  {:<{}}  {}", block.name, width_, table);
        continue;
      }
      line("  {:<{}}  rows {}{} of '{}', {:.4g} of all", block.name, width_, block.rows->index,
           block.per_rank ? " + rank" : "", program_.values[block.rows->routing].name,
           block.rows->share);
    }
  }

  void classes() {
    title("classes of values");
    line("  {:<30} {:>12}  {:<8} {:<14}", "", "bytes", "buffers", "ledger");
    for (const ValueClass& one : program_.classes) {
      std::string notes = one.from_host ? "from the host" : one.counts ? "to the host" : "";
      if (one.in_evaluation != kNone) {
        notes = fmt::format("evaluation alone: {}", program_.classes[one.in_evaluation].name);
      }
      line("  {:<30} {:>12}  {:<8} {:<14} {}", one.name, one.bytes > 0 ? grouped(one.bytes) : "",
           to_string(one.buffers), to_string(one.memory), notes);
    }
  }

  void values() {
    title("values");
    for (const StepValue& value : program_.values) {
      line("  {:<42} {:<30} {}", value.name, program_.classes[value.of].name, waits(value));
    }
  }

  [[nodiscard]] std::string waits(const StepValue& value) const {
    const std::string bytes =
        value.bytes > 0 ? fmt::format(", {} bytes", grouped(value.bytes)) : "";
    switch (value.waits) {
      case Waits::no:
        return bytes;
      case Waits::placed:
        return fmt::format("placed with {}{}", name_of(value.owner), bytes);
      case Waits::kept:
        return fmt::format("kept{}{}", value.recipe == kNone ? "" : " or computed again", bytes);
      case Waits::kept_attention:
        return fmt::format("kept, placed with {}{}", name_of(value.owner), bytes);
      case Waits::again:
        break;
    }
    return fmt::format("computed again{}", bytes);
  }

  void sums() {
    title("gradient sums");
    line("  {:<{}} {:>12} {:>12}", "", width_ + 10, "bytes", "cleared");
    for (const GradientSum& sum : program_.sums) {
      line("  {:<{}} {:>12} {:>12}{}", name_of(sum.block) + (sum.clears ? "" : ", by the head"),
           width_ + 10, grouped(sum.bytes), sum.clears ? grouped(sum.cleared) : "overwritten",
           sum.by_token ? " rows of tokens" : "");
    }
  }

  void head() {
    if (!program_.one_pass) return;
    title("head");
    line("  one pass, if intermediates of {} are kept and on the device: {}; else visits",
         name_of(program_.one_pass->keeper), names_of(program_.one_pass->on_device));
  }

  void recipes() {
    if (program_.recipes.empty()) return;
    title("recipes");
    for (const StepValue& value : program_.values) {
      if (value.recipe == kNone) continue;
      line("  {}", value.name);
      list_stops(program_.recipes[value.recipe].stops, 0);
    }
  }

  /// `first`: index of the first stop.
  void list_stops(const std::vector<Stop>& stops, std::ptrdiff_t first) {
    for (std::size_t s = 0; s < stops.size(); ++s) {
      const Stop& stop = stops[s];
      const std::string_view form = to_string(stop.form);
      if (form != (s == 0 ? "" : to_string(stops[s - 1].form))) {
        line("  {}", form.empty() ? "both forms" : form);
      }
      std::string number = fmt::format("{:>3}", first + static_cast<std::ptrdiff_t>(s));
      if (stop.passes.empty()) line(" {}  nothing", number);
      for (const PassId pass : stop.passes) {
        describe(program_.passes[pass], number);
        number = "   ";
      }
      if (!stop.finishes.empty()) line("        =   {}", names_of(stop.finishes));
    }
  }

  void describe(const Pass& pass, std::string_view number) {
    line(" {}  {:<26} {:<{}} {:>18} {:>16}  {}", number, to_string(pass.kernel),
         name_of(pass.block), width_, amount(pass.cost.flops, "flops"),
         amount(static_cast<double>(pass.cost.traffic), "bytes"), notes(pass));
    arguments(pass, "< ", OperandAccess::reads);
    arguments(pass, "<>", OperandAccess::updates);
    arguments(pass, "> ", OperandAccess::writes);
    for (const Operand& operand : pass.operands) {
      if (operand.optional) line("        ?   {}", optional(operand));
    }
  }

  /// Returns "1,024 bytes", or nothing for 0.
  static std::string amount(double number, std::string_view unit) {
    return number == 0.0 ? "" : fmt::format("{} {}", grouped(number), unit);
  }

  [[nodiscard]] std::string notes(const Pass& pass) const {
    std::string notes = fmt::format("kernels {}", pass.shape);
    const auto is_workspace = [](const Operand& operand) {
      return operand.kind == OperandKind::workspace;
    };
    if (std::any_of(pass.operands.begin(), pass.operands.end(), is_workspace)) {
      notes += ", workspace";
    }
    if (pass.reference > 0) notes += fmt::format(", reference {}", pass.reference);
    if (is_tile(pass)) notes += fmt::format(", tile {}", pass.number);
    if (pass.token_share != 1.0F) notes += fmt::format(", {:.4g} of the tokens", pass.token_share);
    const Bytes received = pass.cost.exchanged;
    if (received > 0) notes += fmt::format(", {} bytes received", grouped(received));
    if (is_between_ranks(pass.kernel)) notes += ", between ranks";
    return notes;
  }
  static bool is_tile(const Pass& pass) {
    return pass.kernel == Kernel::head_scan || pass.kernel == Kernel::head_differentiate;
  }

  void arguments(const Pass& pass, std::string_view sign, OperandAccess access) {
    std::string list;
    for (const Operand& operand : pass.operands) {
      if (operand.optional || operand.access != access) continue;
      if (operand.kind == OperandKind::workspace) continue;
      const std::string one = argument(pass, operand);
      const std::size_t begin = list.rfind('\n') + 1;
      const bool full = list.size() - begin + one.size() > kWidth;
      list += fmt::format("{}{}", list.empty() ? "" : full ? ",\n            " : ", ", one);
    }
    if (!list.empty()) line("        {}  {}", sign, list);
  }

  /// Returns "input: input of layer 0", or only the port if its value is obvious.
  [[nodiscard]] std::string argument(const Pass& pass, const Operand& operand) const {
    const std::string_view port = model::to_string(operand.port);
    std::string name;
    switch (operand.kind) {
      case OperandKind::weights:
      case OperandKind::rows:
        name = operand.number == pass.block ? port : name_of(operand.number);
        break;
      case OperandKind::value:
        name = program_.values[operand.number].name;
        break;
      case OperandKind::gradient:
        name = program_.sums[operand.number].block == pass.block
                   ? port
                   : name_of(program_.sums[operand.number].block);
        break;
      case OperandKind::workspace:
        break;
    }
    return name == port ? name : fmt::format("{}: {}", port, name);
  }

  [[nodiscard]] std::string optional(const Operand& operand) const {
    const PassCost& cost = operand.absent;
    std::string text =
        fmt::format("{} {}: {}", operand.access == OperandAccess::writes ? ">" : "<>",
                    model::to_string(operand.port), program_.values[operand.number].name);
    if (operand.spared.flops > 0.0) {
      return text + fmt::format("; with it {} flops less", grouped(operand.spared.flops));
    }
    if (cost.flops == 0.0 && cost.traffic == 0) return text;
    text += fmt::format("; without it {} flops", grouped(cost.flops));
    if (cost.traffic > 0) text += fmt::format(" and {} bytes", grouped(cost.traffic));
    return text + " more";
  }

  const StepProgram& program_;
  std::size_t width_ = 0;  ///< width of the block names' column
  std::string text_;
};

}  // namespace

std::string to_text(const StepProgram& program) {
  return ProgramText(program).write();
}

}  // namespace ballast::model
