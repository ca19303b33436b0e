#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "ballast/calibrate/machine_rates.h"
#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"
#include "ballast/core/error.h"
#include "ballast/device/device.h"
#include "ballast/engine/blueprint.h"
#include "ballast/formats/weight_files.h"
#include "ballast/plan/simulator.h"
#include "ballast/setup/forecast.h"
#include "ballast/setup/run_plan.h"
#include "ballast/setup/translate.h"
#include "ballast/text/output_file.h"
#include "ballast/train/trace.h"
#include "ballast/train/trainer.h"

#include "src/calibrate/machine_share.h"
#include "src/formats/folder_layout.h"
#include "tools/command_line.h"
#include "tools/commands/requests.h"
#include "tools/console/terminal.h"
#include "tools/program.h"
#include "tools/report/page.h"
#include "tools/signals.h"

namespace ballast::tools {
namespace {

struct PlanArguments {
  ForecastRequest request;
  std::filesystem::path trace;
  std::filesystem::path html;
  bool overwrite = false;
  std::filesystem::path save;
  bool json = false;
};

/// Returns the rates of the given file; none without a file.
std::optional<plan::Rates> given_rates(const ForecastRequest& request) {
  if (request.rates.empty()) return std::nullopt;
  try {
    return calibrate::given_rates(request.rates);
  } catch (const Error& error) {
    refuse_other_kind(request.rates, formats::Settings::rates, error);
    throw;
  }
}

/// Gives `config` the share of one of `world` ranks on this machine, and returns what its rates
/// depend on. The exchange between the ranks cannot be measured by one process.
calibrate::PeerRanks share_machine(const ForecastRequest& request, config::Config& config) {
  const std::uint32_t world = request.world;
  if (device::kind_of(setup::device_options(config)) != "host") {
    throw Error(ErrorCategory::usage,
                fmt::format("{} needs {} with fabric_gbps: the exchange between GPUs of several "
                            "ranks cannot be measured here (configs/rates has files of machines)",
                            option(request.config.caller, "world"),
                            option(request.config.caller, "rates", "FILE")));
  }
  const comm::Launch first = {.launcher = {}, .world = world, .local_world = world};
  const std::vector<calibrate::RankPlace> ranks(
      world, calibrate::read_place(first, setup::own_device_memory(config, 0)));
  const calibrate::MachineShare share = calibrate::share_of(ranks, 0);
  setup::apply_common_share(config, share);
  setup::apply_own_share(config, share);
  const double exchange = calibrate::estimate_exchange(world);
  log(LogLevel::info,
      fmt::format(
          "plan: assumes that all {} ranks run on this machine and that each receives {:.2g} "
          "GB/s in an exchange, half the speed of copies in host memory; for other "
          "machines or a network, give {}",
          world, exchange / 1e9, option(request.config.caller, "rates", "FILE")));
  return {.world = world,
          .local_world = world,
          .sharing = static_cast<std::uint32_t>(share.sharing),
          .received_per_second = exchange};
}

/// Returns the rates of the file, or of this machine. Those are for one of several ranks, whose
/// share of the machine `config` gets.
plan::Rates rates_for(const ForecastRequest& request, config::Config& config) {
  if (auto given = given_rates(request)) return *std::move(given);
  std::optional<calibrate::PeerRanks> peers;
  if (request.world > 1) peers = share_machine(request, config);
  config::Config checked = config;
  if (checked.ballast.out.empty()) checked.ballast.out = default_run_directory(request.config.file);
  train::check_inputs(checked);
  const planner::PlanRequest asked = setup::request_for(checked, {}, request.world, &interrupted());
  planner::require_fit(asked);
  plan::Rates rates =
      calibrate::machine_rates(planner::measured_run(asked), request.recalibrate, &interrupted());
  if (peers) calibrate::share_out(rates, *peers);
  return rates;
}

void write_simulated_steps(const std::filesystem::path& file, const text::OutputRule& rule,
                           const setup::Forecast& forecast) {
  const engine::Blueprint& blueprint = forecast.decision.blueprint;
  const plan::Prediction prediction =
      plan::simulate(blueprint.schedule, forecast.rates, {.timeline = true});
  train::write_trace(file, rule, "simulated", prediction.timeline,
                     step::OperationNames(blueprint.problem));
}

/// The parts of the imported folder that pass through; none if it cannot be read, since a plan does
/// not need the weights.
std::vector<setup::PassingShare> passing_shares(const config::Config& config) {
  std::vector<setup::PassingShare> shares;
  if (config.initial_weights.empty()) return shares;
  try {
    const formats::WeightFiles files(config.initial_weights);
    for (const auto& [part, totals] : formats::passing_totals(files)) {
      shares.push_back({std::string(to_string(part)), totals.elements, totals.bytes});
    }
  } catch (const Error&) {
    shares.clear();
  }
  return shares;
}

void run_plan(const PlanArguments& arguments) {
  const ForecastRequest& request = arguments.request;
  announce_ending("planning ends without a result");
  const config::Config config = forecast_config(request);
  log_notes(config);
  const std::vector<std::filesystem::path> inputs = {request.config.file, request.rates};
  const auto trace = train::trace_rule("simulated", arguments.overwrite, inputs);
  const auto page = page_rule(arguments.overwrite, inputs);
  const auto saved = setup::plan_rule(arguments.overwrite, inputs);
  text::refuse_same_output(arguments.trace, arguments.html);
  text::refuse_same_output(arguments.trace, arguments.save);
  text::refuse_same_output(arguments.html, arguments.save);
  if (!arguments.trace.empty()) text::check_output(arguments.trace, trace);
  if (!arguments.html.empty()) text::check_output(arguments.html, page);
  if (!arguments.save.empty()) text::check_output(arguments.save, saved);
  const setup::Forecast forecast = forecast_of(request, config);
  if (!arguments.trace.empty()) write_simulated_steps(arguments.trace, trace, forecast);
  if (!arguments.html.empty()) {
    text::write_output(arguments.html, page, plan_page(forecast, request.config.file));
  }
  if (!arguments.save.empty()) {
    setup::save_plan(arguments.save, saved, config, forecast);
  }
  if (arguments.json) {
    fmt::print("{}\n", setup::to_json(forecast));
    return;
  }
  fmt::print("ballast plan {}\n", request.config.file.string());
  for (const std::string& line : setup::describe(forecast)) fmt::print("{}\n", line);
  if (!arguments.trace.empty()) fmt::print("trace in {}\n", arguments.trace.string());
  if (!arguments.html.empty()) fmt::print("page in {}\n", arguments.html.string());
  if (!arguments.save.empty()) {
    fmt::print("plan in {}; {}ballast train {} --plan {} runs it{}\n", arguments.save.string(),
               launching_words({.world = request.world}), request.config.file.string(),
               arguments.save.string(),
               request.config.overrides.empty() ? "" : " with the same --set");
  }
}

}  // namespace

config::Config forecast_config(const ForecastRequest& request) {
  config::Config config = request.config.load(request.world);
  if (!config.open_tiles.any()) return config;
  const plan::Rates rates = given_rates(request).value_or(plan::Rates{});
  const model::ModelConfig fitting =
      planner::fitting_tiles(setup::request_for(config, rates, request.world, &interrupted()));
  config.model.vocabulary_tiles = fitting.vocabulary_tiles;
  config.model.layer_tiles = fitting.layer_tiles;
  return config;
}

setup::Forecast forecast_of(const ForecastRequest& request, const config::Config& config) {
  config::Config planned = config;
  const plan::Rates rates = rates_for(request, planned);
  setup::Forecast forecast = setup::make_forecast(planned, rates, request.world, &interrupted());
  forecast.passing = passing_shares(config);
  return forecast;
}

void add_plan(Command program) {
  auto arguments = std::make_shared<PlanArguments>();
  auto& a = *arguments;
  Command command =
      program.add_command("plan", "Predict memory and speed of CONFIG without running it");
  command.add_option("CONFIG", &a.request.config.file, "JSON config (keys: ballast config-keys)",
                     {.required = true, .takes = Names::file, .extensions = {".json"}});
  add_inputs(command, a.request.config);
  command.add_option("--rates", &a.request.rates,
                     "Rates file of the machine (default: measure this machine)",
                     {.takes = Names::file, .extensions = {".json"}});
  command.add_option(
      "--world", &a.request.world, "Number of ranks",
      {.range = std::pair(std::uint64_t{1}, std::uint64_t{1} << 20U), .show_default = true});
  command.add_option("--trace", &a.trace, "Write the simulated timeline, for ui.perfetto.dev",
                     {.takes = Names::new_path, .value = "FILE"});
  command.add_option("--html", &a.html, "Write a page (HTML) with the plan",
                     {.takes = Names::new_path, .value = "FILE"});
  command.add_option("--save", &a.save, "Write the plan, for ballast train --plan",
                     {.takes = Names::new_path, .value = "FILE"});
  command.add_flag("--overwrite", &a.overwrite,
                   "Replace the files of --trace, --html and --save, even of another kind");
  command.add_flag("--recalibrate", &a.request.recalibrate, "Ignore cached rates, measure again",
                   "--rates");
  command.add_flag("--json", &a.json, "Print a JSON object");
  command.set_action([arguments] { run_plan(*arguments); });
}

}  // namespace ballast::tools
