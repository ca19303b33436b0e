#include "ballast/formats/export.h"

#include <filesystem>
#include <memory>
#include <string>

#include <fmt/format.h>
#include <unistd.h>

#include "ballast/checkpoint/checkpoints.h"
#include "ballast/core/error.h"
#include "ballast/core/units.h"

#include "tools/command_line.h"
#include "tools/console/terminal.h"
#include "tools/io_load/load.h"
#include "tools/signals.h"

namespace ballast::tools {
namespace {

struct ExportArguments {
  std::filesystem::path from;
  std::filesystem::path out;
  std::string type;
  std::string shard_size;
  bool merged = false;
  bool codes = false;
  bool states = false;
};

formats::ExportOptions options_of(const ExportArguments& arguments) {
  formats::ExportOptions options = {.merged = arguments.merged, .codes = arguments.codes};
  if (!arguments.shard_size.empty()) {
    options.shard_size = read_size(arguments.shard_size, "--shard-size");
  }
  if (arguments.type == "fp32") options.type = DType::f32;
  if (arguments.type == "bf16") options.type = DType::bf16;
  if (arguments.type == "fp16") options.type = DType::f16;
  return options;
}

void run_export(const ExportArguments& arguments) {
  announce_ending("the export ends and removes what it has written");
  const Terminal terminal(isatty(STDOUT_FILENO) == 1);
  const formats::ExportOptions options = options_of(arguments);
  const auto progress = [&](Bytes done, Bytes total) {
    if (interrupted()) throw Error(ErrorCategory::interrupted, "interrupted");
    terminal.live(fmt::format("exporting, {} of {}", format_bytes(done), format_bytes(total)));
  };
  const auto summary =
      arguments.states ? checkpoint::export_states(arguments.from, arguments.out, progress)
                       : formats::export_model(arguments.from, arguments.out, options, progress);
  terminal.show(fmt::format("{}: {} tensors, {} in {} file{}", arguments.out.string(),
                            summary.tensors, format_bytes(summary.bytes), summary.files,
                            summary.files == 1 ? "" : "s"));
  terminal.show(fmt::format("{} of {} tensors start at multiples of 4 KiB", summary.aligned,
                            summary.tensors));
  if (summary.quantized.tensors > 0) {
    terminal.show(
        fmt::format("{} tensors quantised: error {:.2f}% of the weights (rms), at most "
                    "{:.2f}% of the largest weight of a block",
                    summary.quantized.tensors, 100.0 * summary.quantized.rms,
                    100.0 * summary.quantized.largest));
  }
  if (!summary.note.empty()) terminal.show(summary.note);
}

}  // namespace

void add_export(Command program) {
  auto arguments = std::make_shared<ExportArguments>();
  auto& a = *arguments;
  Command command =
      program.add_command("export",
                          "Write the model of a run as a Hugging Face folder, or a checkpoint "
                          "as a portable one");
  command.add_option("RUN", &a.from,
                     "Run directory or Hugging Face folder; with --states also a checkpoint",
                     {.required = true, .takes = Names::model});
  command.add_option("--out", &a.out, "Folder to make",
                     {.required = true, .takes = Names::new_folder});
  command.add_option(
      "--dtype", &a.type,
      "Type of all weights, also of quantised ones (default: the types of the folder "
      "that the run imported, or that config.json names)",
      {.choices = {"bf16", "fp16", "fp32"}});
  command.add_option("--shard-size", &a.shard_size,
                     "Largest file of several tensors (default: the files of the imported folder, "
                     "else 5GB)",
                     {.value = "SIZE"});
  command.add_flag("--merged", &a.merged,
                   "Merge the adapters of a run or of a PEFT folder into their model "
                   "(default: write a PEFT folder)");
  command.add_flag("--codes", &a.codes,
                   "Write trained weights in the quantised form of the imported folder, MXFP4 or "
                   "block-scaled FP8, rounded to nearest (default: not quantised)");
  command.add_flag("--states", &a.states,
                   "Write weights and optimizer states of the latest intact checkpoint, or of the "
                   "named one, as safetensors from which a run can resume");
  command.set_action([arguments, command] {
    for (const char* option : {"dtype", "shard-size", "merged", "codes"}) {
      if (!arguments->states || !command.given(option)) continue;
      throw Error(ErrorCategory::usage,
                  fmt::format("--{} is for weights; --states writes all bits unchanged, one file "
                              "per block",
                              option));
    }
    run_export(*arguments);
  });
}

}  // namespace ballast::tools
