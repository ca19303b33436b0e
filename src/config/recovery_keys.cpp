#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/units.h"

#include "src/config/key_table.h"

// Keys of checkpoints, and of the reactions to failures.

namespace ballast::config {
namespace {

constexpr std::string_view kIntervalForm = "a number of steps or a time such as \"30m\"";
constexpr std::string_view kDefaultUnit = "m";

/// Splits "30 minutes" into its number ("30") and its unit.
std::pair<std::string, std::string> number_and_unit(const std::string& text) {
  const auto end = std::min(text.find_first_not_of("0123456789. "), text.size());
  std::string number = text.substr(0, end);
  number.erase(std::remove(number.begin(), number.end(), ' '), number.end());
  return {number, text.substr(end, text.find_last_not_of(' ') + 1 - end)};
}

[[noreturn]] void refuse_interval(const Value& value) {
  static const std::vector<std::string> kUnits = {"steps", "seconds", "minutes", "hours", "days"};
  const std::string text = value.json().text();
  const auto [number, unit] = number_and_unit(text);
  constexpr std::size_t kLongest = 32;
  if (number.empty() || text.size() > kLongest) value.fail_type(kIntervalForm);
  const std::string near = unit.size() < 3 ? "" : nearest(unit, kUnits);
  const std::string time = near.empty() || near == kUnits[0]
                               ? fmt::format("\"{}{}\"", number, kDefaultUnit)
                               : fmt::format("\"{} {}\"", number, near);
  value.fail(fmt::format(
      "expected {}, got {}; write {} for steps or {} for a time (s, m, h, d; at most 1000 days)",
      kIntervalForm, value.json().described(), number, time));
}

/// Reads "500 steps"; false if `text` has another unit.
bool read_steps(const std::string& text, std::uint64_t& steps) {
  const auto [number, unit] = number_and_unit(text);
  if (unit != "steps" && unit != "step") return false;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), steps);
  return error == std::errc() && end == number.data() + number.size() && steps <= kSteps.high;
}

/// Formats a time in its largest unit without a fraction.
std::string time_text(double seconds) {
  constexpr std::array<std::pair<double, char>, 3> kUnits = {
      {{86400, 'd'}, {3600, 'h'}, {60, 'm'}}};
  for (const auto& [size, name] : kUnits) {
    if (std::fmod(seconds, size) == 0.0) return fmt::format("{:.0f}{}", seconds / size, name);
  }
  return fmt::format("{}s", seconds);
}

Section spike_keys(SpikeSection& spike) {
  return {row(kResultsOnly, choice("action", spike.action),
              {"the action", "required in an object",
               "`\"off\"`, `\"warn\"`, `\"stop\"`, `\"rollback\"`"}),
          row(kResultsOnly, whole("window", spike.window, {4, 10'000}),
              {"number of previous steps that a loss is compared with. Detection starts with half "
               "of them",
               "50", "4 to 10000"}),
          row(kResultsOnly, real("factor", spike.factor, kPositive),
              {"a loss is a spike if it exceeds the window's mean by this many standard "
               "deviations, or is not finite. 6 is the value of OLMo-core's `SkipStepOptimizer`",
               "6", "above 0"}),
          row(kResultsOnly, whole("most_rollbacks", spike.most_rollbacks, {1, kSteps.high}),
              {"after this many rollbacks without a new checkpoint in between, the next spike "
               "stops the run",
               "3", "at least 1"})};
}

}  // namespace

Key checkpoint_every_key(BallastSection& b) {
  const auto read = [&b](const Value& value) {
    b.checkpoint_every = 0;
    b.checkpoint_seconds = 0.0;
    if (!value.json().is_string() || value.is_auto()) {
      if (!value.json().is_number()) value.fail_type(kIntervalForm);
      b.checkpoint_every = value.whole(kSteps);
    } else if (!read_steps(value.json().text(), b.checkpoint_every)) {
      b.checkpoint_every = 0;
      try {
        b.checkpoint_seconds = parse_seconds(value.json().text());
      } catch (const Error&) {
        refuse_interval(value);
      }
    }
  };
  return {"checkpoint_every", read, [&b] {
            return b.checkpoint_seconds > 0.0 ? Json(time_text(b.checkpoint_seconds))
                                              : Json(b.checkpoint_every);
          }};
}

Key spike_key(SpikeSection& spike) {
  const auto read = [&spike](const Value& value) {
    if (!value.json().is_object()) {
      spike.action = read_choice<SpikeSection::Action>(value);
      return;
    }
    read_section(value, spike_keys(spike));
    const Json* const action = value.json().find("action");
    if (action == nullptr || action->is_null()) {
      value.fail("lacks \"action\"; add \"warn\", \"stop\" or \"rollback\"");
    }
  };
  Key key = {"spike", read, [&spike] { return write_section(spike_keys(spike)); }};
  key.inner = [&spike] { return spike_keys(spike); };
  return key;
}

void check_faults(const BallastSection& b, const Document& document, std::uint64_t world,
                  std::vector<std::string>& notes) {
  constexpr std::string_view kRemedy =
      "needs checkpoints to go back to; set ballast.checkpoint_every";
  if (!b.writes_checkpoints() && b.spike.action == SpikeSection::Action::rollback) {
    document.fail("ballast.spike", fmt::format("\"rollback\" {}", kRemedy));
  }
  if (b.on_error != OnError::resume) return;
  if (!b.writes_checkpoints()) {
    document.fail("ballast.on_error", fmt::format("\"resume\" {}", kRemedy));
  }
  if (world > 1) {
    notes.push_back(
        "ballast.on_error: \"resume\" is for a run of one rank; an error of one of several ranks "
        "ends the run and names the checkpoint to resume from");
  }
}

}  // namespace ballast::config
