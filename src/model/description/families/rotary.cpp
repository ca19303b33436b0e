#include <algorithm>
#include <cmath>
#include <numbers>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/text/json.h"

#include "src/model/description/families/families.h"

namespace ballast::model {
namespace {

using text::Json;

/// Reads the members of rope_scaling. Keys become known by being read; check_unknown() refuses the
/// others.
class Scaling {
 public:
  Scaling(const ModelConfig& config, const Refuse& refuse)
      : object_(config.detail("rope_scaling")), refuse_(refuse) {}

  [[nodiscard]] std::string type() {
    for (const char* const name : {"rope_type", "type"}) {  // older files have the second
      const Json* const found = get(name);
      if (found != nullptr) return found->is_string() ? found->text() : found->compact();
    }
    return "default";
  }
  [[nodiscard]] double number(std::string_view name) {
    if (const auto found = optional(name)) return *found;
    fail(fmt::format("lacks '{}', which type {} needs", name, type()));
  }
  [[nodiscard]] double number(std::string_view name, double standard) {
    return optional(name).value_or(standard);
  }
  [[nodiscard]] std::optional<double> optional(std::string_view name) {
    const Json* const found = get(name);
    if (found == nullptr) return std::nullopt;
    if (!found->is_number() || !(found->number() > 0.0)) {
      fail(fmt::format("'{}' must be a number above 0, got {}", name, found->described()));
    }
    return found->number();
  }
  /// Returns Rotary::slope; 0 if it is not given.
  [[nodiscard]] double growth() {
    const Json* const found = get("llama_4_scaling_beta");
    static_cast<void>(get("original_max_position_embeddings"));
    if (found == nullptr) return 0.0;
    if (!found->is_number() || !(found->number() >= 0.0)) {
      fail(fmt::format("'llama_4_scaling_beta' must be a number of at least 0, got {}",
                       found->described()));
    }
    return found->number();
  }
  [[nodiscard]] bool flag(std::string_view name, bool standard) {
    const Json* const found = get(name);
    if (found == nullptr) return standard;
    if (!found->is_boolean()) fail(fmt::format("'{}' must be true or false", name));
    return found->flag();
  }
  [[nodiscard]] std::vector<double> numbers(std::string_view name, std::size_t count) {
    const Json* const found = get(name);
    std::vector<double> values;
    if (found != nullptr) {
      for (const Json& value : found->elements()) {
        if (value.is_number() && value.number() > 0.0) values.push_back(value.number());
      }
    }
    if (values.size() == count) return values;
    fail(fmt::format("'{}' must be {} numbers above 0", name, count));
  }
  void check_unknown() const {
    for (const Json::Member& member : object_.members()) {
      if (known_.contains(member.key)) continue;
      fail(fmt::format("has the unknown key '{}'", text::printable(member.key)));
    }
  }
  [[noreturn]] void fail(const std::string& rule) const {
    refuse_("rope_scaling", rule);
    throw Error(ErrorCategory::config, rule);  // refuse() has thrown
  }

 private:
  const Json* get(std::string_view name) {
    known_.emplace(name);
    const Json* const found = object_.find(name);
    return found == nullptr || found->is_null() ? nullptr : found;
  }

  const Json& object_;
  const Refuse& refuse_;
  std::set<std::string, std::less<>> known_;
};

std::vector<double> frequencies_of(double theta, std::size_t pairs) {
  std::vector<double> frequencies(pairs);
  for (std::size_t i = 0; i < pairs; ++i) {
    frequencies[i] = std::pow(theta, -static_cast<double>(2 * i) / static_cast<double>(2 * pairs));
  }
  return frequencies;
}

struct Inputs {
  double theta;
  std::size_t pairs;
};

Rotary dynamic(const Inputs& in, Scaling& scaling) {
  const double factor = scaling.number("factor");
  const double trained = scaling.number("original_max_position_embeddings");
  if (in.pairs < 2) scaling.fail("type \"dynamic\" needs at least 4 rotary dimensions per head");
  const std::vector<double> frequencies = frequencies_of(in.theta, in.pairs);
  return {.frequencies = frequencies,
          .trained_length = trained,
          .long_frequencies = frequencies,
          .growth = factor};
}

Rotary llama3(const Inputs& in, Scaling& scaling) {
  const double factor = scaling.number("factor");
  const double low = scaling.number("low_freq_factor");
  const double high = scaling.number("high_freq_factor");
  const double trained = scaling.number("original_max_position_embeddings");
  Rotary rotary = {frequencies_of(in.theta, in.pairs)};
  for (double& frequency : rotary.frequencies) {
    const double wavelength = 2.0 * std::numbers::pi / frequency;
    if (wavelength < trained / high) continue;
    if (wavelength > trained / low) {
      frequency /= factor;
      continue;
    }
    const double smooth = (trained / wavelength - low) / (high - low);
    frequency = (1.0 - smooth) * frequency / factor + smooth * frequency;
  }
  return rotary;
}

/// YaRN's attention factor, 0.1 s ln(factor) + 1 with s = `slope`.
double yarn_factor(double factor, double slope) {
  return factor <= 1.0 ? 1.0 : 0.1 * slope * std::log(factor) + 1.0;
}

Rotary yarn(const Inputs& in, Scaling& scaling) {
  const double factor = scaling.number("factor");
  const double trained = scaling.number("original_max_position_embeddings");
  const double fast = scaling.number("beta_fast", 32.0);
  const double slow = scaling.number("beta_slow", 1.0);
  const bool whole = scaling.flag("truncate", true);
  const auto slope = scaling.optional("mscale");
  const auto slope_of_all = scaling.optional("mscale_all_dim");
  const auto given = scaling.optional("attention_factor");
  const auto dims = static_cast<double>(2 * in.pairs);
  const auto pair_of = [&](double rotations) {
    return dims * std::log(trained / (rotations * 2.0 * std::numbers::pi)) /
           (2.0 * std::log(in.theta));
  };
  double low = pair_of(fast);
  double high = pair_of(slow);
  if (whole) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dims - 1.0);
  if (low == high) high += 0.001;
  Rotary rotary = {frequencies_of(in.theta, in.pairs)};
  for (std::size_t i = 0; i < in.pairs; ++i) {
    const double interpolated = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    double& frequency = rotary.frequencies[i];
    frequency = frequency / factor * interpolated + frequency * (1.0 - interpolated);
  }
  if (given) {
    rotary.factor = *given;
  } else if (slope && slope_of_all) {
    rotary.factor = yarn_factor(factor, *slope) / yarn_factor(factor, *slope_of_all);
  } else {
    rotary.factor = yarn_factor(factor, 1.0);
  }
  return rotary;
}

Rotary longrope(const Inputs& in, Scaling& scaling) {
  const double trained = scaling.number("original_max_position_embeddings");
  const std::vector<double> short_factors = scaling.numbers("short_factor", in.pairs);
  const std::vector<double> long_factors = scaling.numbers("long_factor", in.pairs);
  const double factor = scaling.number("factor");
  const auto attention = scaling.optional("attention_factor");
  const std::vector<double> frequencies = frequencies_of(in.theta, in.pairs);
  Rotary rotary = {
      .frequencies = frequencies, .trained_length = trained, .long_frequencies = frequencies};
  for (std::size_t i = 0; i < in.pairs; ++i) {
    rotary.frequencies[i] /= short_factors[i];
    rotary.long_frequencies[i] /= long_factors[i];
  }
  rotary.factor = attention.value_or(
      factor <= 1.0 ? 1.0 : std::sqrt(1.0 + std::log(factor) / std::log(trained)));
  return rotary;
}

/// A part of the pairs of a whole head turns; the others have frequency 0.
Rotary proportional(double theta, std::uint64_t width, Scaling& scaling) {
  const double part = scaling.number("partial_rotary_factor", 1.0);
  const double factor = scaling.number("factor", 1.0);
  if (part > 1.0) {
    scaling.fail(fmt::format("'partial_rotary_factor' must be at most 1, got {}", part));
  }
  if (width % 2 != 0) scaling.fail(fmt::format("heads of {} values cannot rotate", width));
  const double turning = std::floor(part * static_cast<double>(width) / 2.0);
  Rotary rotary = {frequencies_of(theta, width / 2)};
  for (std::size_t i = 0; i < rotary.frequencies.size(); ++i) {
    double& frequency = rotary.frequencies[i];
    frequency = static_cast<double>(i) < turning ? frequency / factor : 0.0;
  }
  return rotary;
}

Rotary with_alpha(const Inputs& in, double alpha, Scaling& scaling) {
  if (in.pairs < 2) scaling.fail("'alpha' needs at least 4 rotary dimensions per head");
  const auto dims = static_cast<double>(2 * in.pairs);
  return {frequencies_of(in.theta * std::pow(alpha, dims / (dims - 2.0)), in.pairs)};
}

Rotary scaled(const Inputs& in, Scaling& scaling) {
  const std::string type = scaling.type();
  if (type == "default") return {frequencies_of(in.theta, in.pairs)};
  if (type == "linear") {
    Rotary rotary = {frequencies_of(in.theta, in.pairs)};
    const double factor = scaling.number("factor");
    for (double& frequency : rotary.frequencies) frequency /= factor;
    return rotary;
  }
  if (type == "dynamic") return dynamic(in, scaling);
  if (type == "llama3") return llama3(in, scaling);
  if (type == "yarn") return yarn(in, scaling);
  if (type == "longrope" || type == "su") return longrope(in, scaling);
  const std::vector<std::string> types = {"default", "linear",   "dynamic",     "llama3",
                                          "yarn",    "longrope", "proportional"};
  scaling.fail(fmt::format("'{}' is not a type; choose one of {}{}", text::printable(type),
                           listed(types), did_you_mean(type, types)));
}

}  // namespace

Rotary plain_rotary_positions(const ModelConfig& c, std::string_view key, const Refuse& refuse) {
  const double theta = c.number(key);
  if (!(theta > 0.0)) refuse(key, fmt::format("must be above 0, got {}", theta));
  return {frequencies_of(theta, c.head_dim / 2)};
}

Rotary rotary_positions(const ModelConfig& c, const Refuse& refuse, const RotaryUse& use) {
  Scaling scaling(c, refuse);
  const double theta = scaling.number("rope_theta", c.number("rope_theta"));
  if (!(theta > 0.0)) refuse("rope_theta", fmt::format("must be above 0, got {}", theta));
  const std::uint64_t width = use.width > 0 ? use.width : c.head_dim;
  if (scaling.type() == "proportional") {
    Rotary rotary = proportional(theta, width, scaling);
    scaling.check_unknown();
    return rotary;
  }
  const double given_part =
      c.details.contains("partial_rotary_factor") ? c.number("partial_rotary_factor") : 1.0;
  const double part = scaling.number("partial_rotary_factor", given_part);
  const double exact = static_cast<double>(width) * part;
  const bool fits = exact >= 0.0 && exact <= static_cast<double>(width) && exact < 0x1p63;
  const auto dims = fits ? static_cast<std::uint64_t>(exact) : 0;
  if (dims == 0 || dims > width || dims % 2 != 0) {
    if (part == 1.0) {
      refuse("head_dim", fmt::format("{} is odd; rotary positions need an even one", c.head_dim));
    }
    refuse("partial_rotary_factor",
           fmt::format("{} of head_dim {} is {} values; rotary positions need an even number of at "
                       "most head_dim",
                       part, c.head_dim, fits ? static_cast<double>(dims) : exact));
  }
  const auto alpha = use.alpha && scaling.type() == "dynamic" ? scaling.optional("alpha")
                                                              : std::optional<double>();
  const Inputs inputs = {theta, dims / 2};
  Rotary rotary = alpha ? with_alpha(inputs, *alpha, scaling) : scaled(inputs, scaling);
  if (use.grows) {
    rotary.slope = scaling.growth();
    if (rotary.slope > 0.0) rotary.period = scaling.number("original_max_position_embeddings");
  }
  scaling.check_unknown();
  return rotary;
}

double yarn_score_factor(const ModelConfig& c) {
  const Json& scaling = c.detail("rope_scaling");
  const Json* const slope = scaling.find("mscale_all_dim");
  const Json* const factor = scaling.find("factor");
  if (slope == nullptr || !slope->is_number() || factor == nullptr || !factor->is_number())
    return 1.0;
  const double m = yarn_factor(factor->number(), slope->number());
  return m * m;
}

}  // namespace ballast::model
