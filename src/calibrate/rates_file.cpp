#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "ballast/calibrate/machine_rates.h"
#include "ballast/core/error.h"
#include "ballast/core/units.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

namespace ballast::calibrate {
namespace {

using plan::Curve;
using plan::CurvePoint;
using plan::Rates;
using text::Json;

// Powers of ten of the units in key names.
constexpr int kGiga = 9;
constexpr int kTera = 12;
constexpr int kMicro = -6;

/// Location of a value in the file, for messages.
struct ValuePlace {
  const std::string& file;
  std::string path;

  [[noreturn]] void fail(const std::string& message) const {
    throw Error(ErrorCategory::config, fmt::format("{}: {}: {}", file, path, message));
  }
  [[noreturn]] void expected(std::string_view what, const Json& found) const {
    fail(fmt::format("expected {}, got {}", what, found.described()));
  }
};

double read_number(const ValuePlace& place, const Json& value, int power) {
  if (!value.is_number()) place.expected("a number", value);
  const double number = text::scaled_number(value.text(), power);
  if (!(number >= 0.0)) place.fail(fmt::format("must be at least 0, got {}", value.text()));
  if (!std::isfinite(number)) place.fail(fmt::format("too large: {}", value.text()));
  return number;
}

std::uint64_t read_whole(const ValuePlace& place, const Json& value, double largest) {
  const double number = read_number(place, value, 0);
  if (number != std::floor(number)) place.expected("a whole number", value);
  if (number > largest) {
    place.fail(fmt::format("must be at most {:.0f}, got {}", largest, value.text()));
  }
  return static_cast<std::uint64_t>(number);
}

/// One key of a rates file. A table of keys is bound to one Rates object.
struct RateKey {
  std::string name;
  std::function<void(const ValuePlace&, const Json&)> read;
  std::function<Json()> write;  ///< null: the default, which is omitted
};

RateKey number(std::string name, double& target, int power) {
  return {std::move(name),
          [&target, power](const ValuePlace& place, const Json& value) {
            target = read_number(place, value, power);
          },
          [&target, power] { return target == 0.0 ? Json() : text::scaled_json(target, power); }};
}

/// A share between 0 and 1 (exclusive); 0.5 by default.
RateKey share(std::string name, double& target) {
  return {std::move(name),
          [&target](const ValuePlace& place, const Json& value) {
            target = read_number(place, value, 0);
            if (!(target > 0.0 && target < 1.0)) {
              place.fail(fmt::format("must be above 0 and below 1, got {}", value.text()));
            }
          },
          [&target] { return target == 0.5 ? Json() : text::scaled_json(target, 0); }};
}

RateKey whole(std::string name, unsigned& target, unsigned usual) {
  return {std::move(name),
          [&target, usual](const ValuePlace& place, const Json& value) {
            constexpr double kMax = 1U << 24U;
            target = static_cast<unsigned>(read_whole(place, value, kMax));
            if (target < usual) place.fail(fmt::format("must be at least {}", usual));
          },
          [&target, usual] { return target == usual ? Json() : Json(target); }};
}

RateKey size(std::string name, Bytes& target) {
  return {std::move(name),
          [&target](const ValuePlace& place, const Json& value) {
            if (!value.is_number() && !value.is_string()) place.expected(kSizeForm, value);
            if (value.is_number()) read_whole(place, value, 0x1p62);
            if (const auto bytes = value.whole()) {
              target = *bytes;
              return;
            }
            try {
              target = parse_bytes(value.text());
            } catch (const Error&) {
              place.expected(kSizeForm, value);
            }
          },
          [&target] { return target == 0 ? Json() : Json(target); }};
}

RateKey text_key(std::string name, std::string& target) {
  return {std::move(name),
          [&target](const ValuePlace& place, const Json& value) {
            if (!value.is_string()) place.expected("a string", value);
            target = value.text();
          },
          [&target] { return Json(target); }};
}

/// Reads the values of `keys` from `object`, in any order.
void read_keys(const std::string& file, const std::string& path, const Json& object,
               const std::vector<RateKey>& keys) {
  std::vector<std::string> names;
  names.reserve(keys.size());
  for (const RateKey& key : keys) names.push_back(key.name);
  for (const auto& [name, value, at] : object.members()) {
    const ValuePlace place = {file, path.empty() ? name : path + "." + name};
    const auto found = std::find(names.begin(), names.end(), name);
    if (found == names.end()) {
      constexpr std::size_t kLongestName = 64;
      place.fail("unknown key" + (name.size() > kLongestName ? "" : did_you_mean(name, names)));
    }
    keys[static_cast<std::size_t>(found - names.begin())].read(place, value);
  }
}

CurvePoint read_point(const ValuePlace& place, const Json& value) {
  if (!value.is_object()) place.expected("an object with tokens and tflops", value);
  CurvePoint point;
  read_keys(place.file, place.path, value,
            {number("tokens", point.tokens, 0), number("tflops", point.flops_per_second, kTera)});
  if (!(point.tokens > 0.0)) place.fail("tokens must be above 0");
  if (!(point.flops_per_second > 0.0)) place.fail("tflops must be above 0");
  return point;
}

Curve read_curve(const ValuePlace& place, const Json& value) {
  if (!value.is_array()) place.expected("an array of points", value);
  Curve curve;
  curve.reserve(value.elements().size());
  for (std::size_t i = 0; i < value.elements().size(); ++i) {
    const ValuePlace point = {place.file, fmt::format("{}[{}]", place.path, i)};
    curve.push_back(read_point(point, value.elements()[i]));
    if (i > 0 && !(curve[i - 1].tokens < curve[i].tokens)) {
      point.fail("points must be in ascending order of tokens");
    }
  }
  return curve;
}

Json write_curve(const Curve& curve) {
  Json points;
  for (const CurvePoint& point : curve) {
    points.push_back(Json::object({{"tokens", text::scaled_json(point.tokens, 0)},
                                   {"tflops", text::scaled_json(point.flops_per_second, kTera)}}));
  }
  return points;
}

RateKey curve(std::string name, Curve& target) {
  return {
      std::move(name),
      [&target](const ValuePlace& place, const Json& value) { target = read_curve(place, value); },
      [&target] { return write_curve(target); }};
}

std::vector<RateKey> keys_of(Rates& rates) {
  std::vector<RateKey> keys = {text_key("name", rates.name), curve("forward", rates.forward),
                               curve("backward", rates.backward), curve("head", rates.head)};
  for (const AttentionClassInfo& info : kAttentionClasses) {
    plan::AttentionRate& rate = rates.of(info.id);
    keys.push_back(number(fmt::format("{}_forward_tflops", info.key), rate.forward, kTera));
    keys.push_back(number(fmt::format("{}_backward_tflops", info.key), rate.backward, kTera));
  }
  keys.insert(keys.end(), {number("adapter_gbps", rates.adapter_per_second, kGiga),
                           number("device_memory_gbps", rates.device_memory_per_second, kGiga),
                           number("launch_us", rates.launch_seconds, kMicro),
                           number("update_gbps", rates.update_per_second, kGiga),
                           number("host_memory_gbps", rates.host_memory_per_second, kGiga),
                           number("upload_gbps", rates.upload_per_second, kGiga),
                           number("offload_gbps", rates.offload_per_second, kGiga),
                           number("peer_gbps", rates.peer_per_second, kGiga),
                           number("read_gbps", rates.read_per_second, kGiga),
                           number("write_gbps", rates.write_per_second, kGiga),
                           number("mixed_gbps", rates.mixed_per_second, kGiga),
                           share("mixed_read_share", rates.mixed_read_share),
                           number("io_latency_us", rates.io_latency_seconds, kMicro),
                           number("fabric_gbps", rates.fabric_per_second, kGiga),
                           number("network_gbps", rates.network_per_second, kGiga),
                           whole("ranks_per_node", rates.ranks_per_node, 1),
                           whole("devices", rates.devices, 0),
                           whole("shared_cores", rates.shared_cores, 0),
                           whole("compute_threads", rates.compute_threads, 0),
                           whole("update_threads", rates.update_threads, 0),
                           number("link_cores", rates.link_cores, 0),
                           number("io_cores", rates.io_cores, 0),
                           number("compute_beside_copy", rates.compute_beside_copy, 0),
                           number("compute_beside_io", rates.compute_beside_io, 0),
                           number("update_beside_io", rates.update_beside_io, 0),
                           number("io_beside_compute", rates.io_beside_compute, 0),
                           number("io_beside_update", rates.io_beside_update, 0),
                           whole("corrections", rates.corrections, 0),
                           number("other_work", rates.other_work, 0),
                           number("spread", rates.spread, 0),
                           number("measured_at_s", rates.measured_at, 0),
                           size("device_memory", rates.device_bytes),
                           size("host_memory", rates.host_bytes),
                           size("nvme_space", rates.nvme_bytes),
                           number("drive_writes_tb", rates.drive_writes_bytes, kTera)});
  return keys;
}

}  // namespace

Rates read_rates_json(const Json& object, const std::string& name) {
  if (!object.is_object()) {
    throw Error(ErrorCategory::config,
                fmt::format("{}: expected an object of rates, got {}", name, object.described()));
  }
  Rates rates;
  read_keys(name, "", object, keys_of(rates));
  return rates;
}

Json rates_json(const Rates& rates) {
  Rates copy = rates;
  Json object = Json::object();
  for (const RateKey& key : keys_of(copy)) {
    if (Json value = key.write(); !value.is_null()) object.add(key.name, std::move(value));
  }
  return object;
}

Rates given_rates(const std::filesystem::path& file) {
  Rates rates = load_rates(file);
  plan::complete(rates);
  return rates;
}

Rates load_rates(const std::filesystem::path& file) {
  const std::string name = file.string();
  Rates rates = read_rates_json(
      text::parse_json(text::read_settings(file, "rates"), name, {.comments = true}), name);
  if (rates.name.empty()) rates.name = file.stem().string();
  return rates;
}

void save_rates(const std::filesystem::path& file, const Rates& rates) {
  text::ReplacedFile replaced(file);
  replaced.write(rates_json(rates).pretty(1) + "\n");
  replaced.commit();
}

}  // namespace ballast::calibrate
