#include "ballast/planning/wear.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

namespace ballast::planning {
namespace {

constexpr double kTerabyte = 1e12;

/// As many digits as an estimate deserves: "0.042", "3.1", "190", "12000".
std::string short_number(double value) {
  return value >= 9.95 ? fmt::format("{:.0f}", value) : fmt::format("{:.2g}", value);
}

std::string life(double days) {
  constexpr double kYear = 365.25;
  constexpr double kManyYears = 100.0;
  if (days >= kManyYears * kYear) return "more than 100 years";
  if (days >= 3.0 * kYear) return short_number(days / kYear) + " years";
  const std::string number = short_number(days);
  return number + (number == "1" ? " day" : " days");
}

}  // namespace

std::optional<Wear> estimate_wear(std::span<const Bytes> written, double seconds,
                                  double rated_bytes) {
  constexpr double kDay = 86400.0;
  const Bytes all = std::accumulate(written.begin(), written.end(), Bytes{0});
  if (all == 0 || !(seconds > 0.0)) return std::nullopt;
  const auto most = static_cast<double>(*std::max_element(written.begin(), written.end()));
  return Wear{static_cast<double>(all) / seconds * kDay / kTerabyte,
              rated_bytes / (most / seconds * kDay), rated_bytes};
}

std::string describe(const Wear& wear) {
  return fmt::format("{} TB a day at this pace: a drive rated {:.0f} TBW lasts {}",
                     short_number(wear.terabytes_per_day), wear.rated_bytes / kTerabyte,
                     life(wear.days));
}

}  // namespace ballast::planning
