#include "ballast/planning/rates_file.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "ballast/core/error.h"
#include "ballast/core/suggest.h"
#include "ballast/core/units.h"

#include "src/planning/rates_text.h"
#include "src/train/posix_file.h"
#include "src/train/replaced_file.h"

namespace ballast::planning {
namespace {

using schedule::Curve;
using schedule::CurvePoint;
using schedule::Rates;
using Type = RatesValue::Type;

// Powers of ten of the units in the keys' names.
constexpr int kGiga = 9;
constexpr int kTera = 12;
constexpr int kMicro = -6;

/// A value of the file and where it stands, for messages.
struct Place {
  const std::string& file;
  std::string path;

  [[noreturn]] void fail(const std::string& message) const {
    throw Error(ErrorCategory::config, fmt::format("{}: {}: {}", file, path, message));
  }
  [[noreturn]] void expected(std::string_view what, const RatesValue& found) const {
    fail(fmt::format("expected {}, got {}", what, found.described()));
  }
};

double read_number(const Place& place, const RatesValue& value, int power) {
  if (value.type != Type::number) place.expected("a number", value);
  const double number = scaled_number(value.text, power);
  if (!(number >= 0.0)) place.fail(fmt::format("must be at least 0, got {}", value.text));
  if (!std::isfinite(number)) place.fail(fmt::format("too large: {}", value.text));
  return number;
}

std::uint64_t read_whole(const Place& place, const RatesValue& value, double largest) {
  const double number = read_number(place, value, 0);
  if (number != std::floor(number)) place.expected("a whole number", value);
  if (number > largest) {
    place.fail(fmt::format("must be at most {:.0f}, got {}", largest, value.text));
  }
  return static_cast<std::uint64_t>(number);
}

/// One key of a rates file. The table of keys is bound to one Rates.
struct Key {
  std::string name;
  std::function<void(const Place&, const RatesValue&)> read;
  std::function<std::string()> write;  ///< JSON; "" for what need not be said
};

Key number(std::string name, double& target, int power) {
  return {std::move(name),
          [&target, power](const Place& place, const RatesValue& value) {
            target = read_number(place, value, power);
          },
          [&target, power] { return target == 0.0 ? "" : scaled_digits(target, power); }};
}

/// Between none and all of something; half of it when the file does not say.
Key share(std::string name, double& target) {
  return {std::move(name),
          [&target](const Place& place, const RatesValue& value) {
            target = read_number(place, value, 0);
            if (!(target > 0.0 && target < 1.0)) {
              place.fail(fmt::format("must be above 0 and below 1, got {}", value.text));
            }
          },
          [&target] { return target == 0.5 ? "" : scaled_digits(target, 0); }};
}

Key whole(std::string name, unsigned& target, unsigned usual) {
  return {std::move(name),
          [&target, usual](const Place& place, const RatesValue& value) {
            constexpr double kMost = 1U << 24U;
            target = static_cast<unsigned>(read_whole(place, value, kMost));
            if (target < usual) place.fail(fmt::format("must be at least {}", usual));
          },
          [&target, usual] { return target == usual ? "" : fmt::format("{}", target); }};
}

Key size(std::string name, Bytes& target) {
  return {std::move(name),
          [&target](const Place& place, const RatesValue& value) {
            constexpr std::string_view kSize =
                "a size (a number of bytes or a string such as \"512 MiB\")";
            if (value.type != Type::number && value.type != Type::text) {
              place.expected(kSize, value);
            }
            if (value.type == Type::number) read_whole(place, value, 0x1p62);
            const char* end = value.text.data() + value.text.size();
            if (std::from_chars(value.text.data(), end, target).ptr == end) return;
            try {
              target = parse_bytes(value.text);
            } catch (const Error&) {
              place.expected(kSize, value);
            }
          },
          [&target] { return target == 0 ? "" : fmt::format("{}", target); }};
}

constexpr auto kReplace = nlohmann::json::error_handler_t::replace;  // what is not UTF-8

Key text(std::string name, std::string& target) {
  return {std::move(name),
          [&target](const Place& place, const RatesValue& value) {
            if (value.type != Type::text) place.expected("a string", value);
            target = value.text;
          },
          [&target] { return nlohmann::json(target).dump(-1, ' ', false, kReplace); }};
}

/// The values of `keys` from `object`, in any order.
void read_keys(const std::string& file, const std::string& path, const RatesValue& object,
               const std::vector<Key>& keys) {
  std::vector<std::string> names;
  names.reserve(keys.size());
  for (const Key& key : keys) names.push_back(key.name);
  for (std::size_t i = 0; i < object.keys.size(); ++i) {
    const std::string& name = object.keys[i];
    const Place place = {file, path.empty() ? name : path + "." + name};
    const auto found = std::find(names.begin(), names.end(), name);
    if (found == names.end()) {
      constexpr std::size_t kLongestName = 64;
      place.fail("unknown key" + (name.size() > kLongestName ? "" : did_you_mean(name, names)));
    }
    keys[static_cast<std::size_t>(found - names.begin())].read(place, object.elements[i]);
  }
}

CurvePoint read_point(const Place& place, const RatesValue& value) {
  if (value.type != Type::object) place.expected("an object with tokens and tflops", value);
  CurvePoint point;
  read_keys(place.file, place.path, value,
            {number("tokens", point.tokens, 0), number("tflops", point.flops_per_second, kTera)});
  if (!(point.tokens > 0.0)) place.fail("tokens must be above 0");
  if (!(point.flops_per_second > 0.0)) place.fail("tflops must be above 0");
  return point;
}

Curve read_curve(const Place& place, const RatesValue& value) {
  if (value.type != Type::array) place.expected("an array of points", value);
  Curve curve;
  curve.reserve(value.elements.size());
  for (std::size_t i = 0; i < value.elements.size(); ++i) {
    const Place point = {place.file, fmt::format("{}[{}]", place.path, i)};
    curve.push_back(read_point(point, value.elements[i]));
    if (i > 0 && !(curve[i - 1].tokens < curve[i].tokens)) {
      point.fail("points must stand in ascending order of tokens");
    }
  }
  return curve;
}

std::string write_curve(const Curve& curve) {
  std::string result;
  for (const CurvePoint& point : curve) {
    result +=
        fmt::format("{}{{\"tokens\": {}, \"tflops\": {}}}", result.empty() ? "[" : ", ",
                    scaled_digits(point.tokens, 0), scaled_digits(point.flops_per_second, kTera));
  }
  return result.empty() ? "" : result + "]";
}

Key curve(std::string name, Curve& target) {
  return {
      std::move(name),
      [&target](const Place& place, const RatesValue& value) { target = read_curve(place, value); },
      [&target] { return write_curve(target); }};
}

std::vector<Key> keys_of(Rates& rates) {
  return {text("name", rates.name),
          curve("forward", rates.forward),
          curve("backward", rates.backward),
          curve("head", rates.head),
          number("device_memory_gbps", rates.device_memory_per_second, kGiga),
          number("launch_us", rates.launch_seconds, kMicro),
          number("update_gbps", rates.update_per_second, kGiga),
          number("upload_gbps", rates.upload_per_second, kGiga),
          number("offload_gbps", rates.offload_per_second, kGiga),
          number("read_gbps", rates.read_per_second, kGiga),
          number("write_gbps", rates.write_per_second, kGiga),
          number("mixed_gbps", rates.mixed_per_second, kGiga),
          share("mixed_read_share", rates.mixed_read_share),
          number("io_latency_us", rates.io_latency_seconds, kMicro),
          number("fabric_gbps", rates.fabric_per_second, kGiga),
          number("network_gbps", rates.network_per_second, kGiga),
          whole("ranks_per_node", rates.ranks_per_node, 1),
          whole("shared_cores", rates.shared_cores, 0),
          whole("compute_threads", rates.compute_threads, 0),
          whole("update_threads", rates.update_threads, 0),
          number("link_cores", rates.link_cores, 0),
          number("io_cores", rates.io_cores, 0),
          size("device_memory", rates.device_bytes),
          size("host_memory", rates.host_bytes),
          size("nvme_space", rates.nvme_bytes),
          number("drive_writes_tb", rates.drive_writes_bytes, kTera)};
}

std::string read_text(const std::filesystem::path& path) {
  constexpr Bytes kLongest = kMiB;
  const Descriptor file = train::open_file(path, O_RDONLY | O_NONBLOCK, ErrorCategory::config);
  const Bytes bytes = train::regular_file_size(file, path, ErrorCategory::config);
  if (bytes > kLongest) {
    throw Error(ErrorCategory::config,
                fmt::format("{} is too long for a file of rates", path.string()));
  }
  std::string text(bytes, '\0');
  train::read_fully(file, path, 0, std::as_writable_bytes(std::span(text)));
  return text;
}

}  // namespace

Rates load_rates(const std::filesystem::path& file) {
  const std::string name = file.string();
  const RatesValue object = parse_rates_text(name, read_text(file));
  Rates rates;
  rates.name = file.stem().string();
  read_keys(name, "", object, keys_of(rates));
  return rates;
}

void save_rates(const std::filesystem::path& file, const Rates& rates) {
  Rates copy = rates;
  std::string text;
  for (const Key& key : keys_of(copy)) {
    const std::string value = key.write();
    if (value.empty()) continue;
    text += fmt::format("{}\"{}\": {}", text.empty() ? "{\n  " : ",\n  ", key.name, value);
  }
  train::ReplacedFile replaced(file);
  replaced.write(text + "\n}\n");
  replaced.commit();
}

}  // namespace ballast::planning
