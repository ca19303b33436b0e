#include "aio/faults/faulty_transport.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <iterator>
#include <type_traits>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/random.h"

#include "aio/transport.h"

namespace ballast::aio {

namespace {

const std::vector<std::string> kKeys = {"on",    "after", "every", "times",
                                        "bytes", "reaps", "seed",  "percent"};

[[noreturn]] void refuse(const std::string& problem) {
  throw Error(ErrorCategory::config, problem);
}

/// The parts of `text` between separators; one empty part for an empty text.
std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> pieces;
  while (true) {
    const auto end = text.find(separator);
    pieces.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return pieces;
    text.remove_prefix(end + 1);
  }
}

template <typename Number>
Number parse_number(std::string_view key, std::string_view value, Number least, Number most) {
  Number number{};
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc() || end != value.data() + value.size() || !(number >= least) ||
      !(number <= most)) {
    std::string problem = fmt::format("{}={}: write a ", key, value);
    problem += std::is_integral_v<Number> ? "whole number from " : "number from ";
    problem += fmt::to_string(least);
    problem += most == std::numeric_limits<Number>::max() ? " up" : " to " + fmt::to_string(most);
    refuse(problem);
  }
  return number;
}

std::uint64_t parse_whole(std::string_view key, std::string_view value, std::uint64_t least) {
  return parse_number<std::uint64_t>(key, value, least, std::numeric_limits<std::uint64_t>::max());
}

}  // namespace

struct FaultPlan::KindName {
  std::string name;
  Kind kind;
  int error_number;
  bool reads;
  bool writes;
};

const std::vector<FaultPlan::KindName>& FaultPlan::kinds() {
  static const std::vector<KindName> all = {
      {"short", Kind::short_transfer, 0, true, true},
      {"eio", Kind::error, EIO, true, true},
      {"enospc", Kind::error, ENOSPC, false, true},
      {"eintr", Kind::error, EINTR, true, true},
      {"eagain", Kind::error, EAGAIN, true, true},
      {"late", Kind::late, 0, true, true},
      {"reorder", Kind::reorder, 0, true, true},
      {"flip", Kind::flip, 0, true, false},
      {"torn", Kind::torn, 0, false, true},
      {"lost", Kind::lost, 0, false, true},
      {"hang", Kind::hang, 0, true, true},
  };
  return all;
}

FaultPlan::FaultPlan(std::string_view text) : text_(text) {
  for (const std::string_view rule : split(text, ',')) rules_.push_back(parse_rule(rule));
}

FaultPlan::Rule FaultPlan::parse_rule(std::string_view text) {
  const auto pieces = split(text, ':');
  const std::string name(pieces.front());
  const auto found = std::ranges::find(kinds(), name, &KindName::name);
  if (found == kinds().end()) {
    std::vector<std::string> names;
    std::ranges::transform(kinds(), std::back_inserter(names), &KindName::name);
    refuse(fmt::format("there is no fault '{}'{}; choose from {}", name, did_you_mean(name, names),
                       listed(names)));
  }
  Rule rule{.kind = found->kind,
            .error_number = found->error_number,
            .reads = found->reads,
            .writes = found->writes};
  // Retries are starts, too. If every start failed, the transfer would never end.
  if (rule.error_number == EINTR || rule.error_number == EAGAIN) rule.every = 2;
  for (std::size_t i = 1; i < pieces.size(); ++i) parse_key(pieces[i], name, rule);
  return rule;
}

void FaultPlan::parse_key(std::string_view text, std::string_view kind, Rule& rule) {
  const auto equals = text.find('=');
  const std::string key(text.substr(0, equals));
  if (std::ranges::find(kKeys, key) == kKeys.end()) {
    refuse(fmt::format("fault {} has no key '{}'{}; choose from {}", kind, key,
                       did_you_mean(key, kKeys), listed(kKeys)));
  }
  if (equals == std::string_view::npos) {
    refuse(fmt::format("fault {}: '{}' has no value; write {}=VALUE", kind, key, key));
  }
  const std::string_view value = text.substr(equals + 1);
  const auto only_for = [&](Kind owner, std::string_view name) {
    if (rule.kind != owner) refuse(fmt::format("{} belongs to fault {}, not {}", key, name, kind));
  };
  if (key == "on") {
    parse_direction(value, kind, rule);
  } else if (key == "after") {
    rule.after = parse_whole(key, value, 0);
  } else if (key == "every") {
    rule.every = parse_whole(key, value, 1);
  } else if (key == "times") {
    rule.times = parse_whole(key, value, 1);
  } else if (key == "seed") {
    rule.seed = parse_whole(key, value, 0);
  } else if (key == "percent") {
    rule.percent = parse_number(key, value, 0.0, 100.0);
  } else if (key == "bytes") {
    only_for(Kind::short_transfer, "short");
    rule.bytes = parse_bytes(value);
  } else {
    only_for(Kind::late, "late");
    rule.reaps = parse_number<unsigned>(key, value, 1, std::numeric_limits<unsigned>::max());
  }
}

void FaultPlan::parse_direction(std::string_view value, std::string_view kind, Rule& rule) {
  if (value != "read" && value != "write") {
    refuse(fmt::format("on={}: write on=read or on=write", value));
  }
  bool& chosen = value == "read" ? rule.reads : rule.writes;
  if (!chosen) {
    refuse(fmt::format("fault {} applies to {} only; remove on={}", kind,
                       rule.reads ? "reads" : "writes", value));
  }
  (value == "read" ? rule.writes : rule.reads) = false;
}

Fault FaultPlan::operator()(const Block& block) {
  Fault fault;
  for (Rule& rule : rules_) {
    if (hits(rule, block)) inflict(rule, block, fault);
  }
  return fault;
}

bool FaultPlan::hits(Rule& rule, const Block& block) {
  if (!(block.direction == Direction::read ? rule.reads : rule.writes)) return false;
  if (rule.hits == rule.times) return false;
  const std::uint64_t number = ++rule.seen;
  if (number <= rule.after || (number - rule.after) % rule.every != 0) return false;
  constexpr double kWhole = 0x1p64;
  const auto die = static_cast<double>(random_u64(rule.seed, number));
  if (rule.percent < 100.0 && die >= rule.percent / 100.0 * kWhole) return false;
  ++rule.hits;
  return true;
}

void FaultPlan::inflict(const Rule& rule, const Block& block, Fault& fault) {
  switch (rule.kind) {
    case Kind::short_transfer: {
      const std::size_t half = std::max<std::size_t>(kPage, block.length / 2 / kPage * kPage);
      fault.at_most = std::min<std::size_t>(fault.at_most, rule.bytes.value_or(half));
      break;
    }
    case Kind::error:
      if (fault.error_number == 0) fault.error_number = rule.error_number;
      break;
    case Kind::late:
      fault.held_back = std::max(fault.held_back, rule.reaps);
      break;
    case Kind::reorder:
      fault.reordered = true;
      break;
    case Kind::flip:
      fault.flip = random_u64(rule.seed + 1, rule.hits);
      break;
    case Kind::torn:
      fault.torn = true;
      break;
    case Kind::lost:
      fault.lost = true;
      break;
    case Kind::hang:
      fault.hang = true;
      break;
  }
}

std::optional<FaultPlan> faults_from_environment() {
  const char* text = std::getenv("BALLAST_IO_FAULTS");
  if (text == nullptr || *text == '\0') return std::nullopt;
  try {
    return FaultPlan(text);
  } catch (const Error& error) {
    throw error.with_context("environment variable BALLAST_IO_FAULTS");
  }
}

FaultyTransport::FaultyTransport(std::unique_ptr<Transport> inner, Plan plan)
    : plan_(std::move(plan)), inner_(std::move(inner)) {}

void FaultyTransport::start(Block& block) {
  const Fault fault = plan_(block);
  if (fault.hang && !hangs_ended_) {
    hung_.push_back(&block);
  } else if (fault.error_number != 0) {
    block.result = -fault.error_number;
    held_.push_back({&block, fault.held_back, fault.reordered});
  } else {
    carry(block, fault);
  }
}

void FaultyTransport::carry(Block& block, const Fault& fault) {
  auto shadow = std::make_unique<Shadow>();
  static_cast<Block&>(*shadow) = block;
  shadow->original = &block;
  shadow->fault = fault;
  if (fault.at_most < block.length) {
    shadow->length = std::min<std::size_t>(block.length, round_up(fault.at_most, kPage));
  }
  if (fault.torn) shadow->length = shadow->length / 2 / kPage * kPage;
  if (fault.lost) shadow->length = 0;
  if (shadow->length == 0) {
    block.result = static_cast<long>(std::min(block.length, fault.at_most));
    held_.push_back({&block, fault.held_back, fault.reordered});
    return;
  }
  inner_->start(*shadow);
  carried_.emplace(shadow.get(), std::move(shadow));
}

void FaultyTransport::end_hangs() noexcept {
  hangs_ended_ = true;
  inner_->wake();
}

void FaultyTransport::resume_hung() {
  for (Block* block : std::exchange(hung_, {})) carry(*block, {});
}

void FaultyTransport::reap(std::vector<Block*>& finished, unsigned wanted,
                           std::chrono::milliseconds patience) {
  if (hangs_ended_) resume_hung();
  if (held_.empty() || !carried_.empty()) reap_inner(wanted, patience);
  hand_back(finished);
}

void FaultyTransport::reap_inner(unsigned wanted, std::chrono::milliseconds patience) {
  std::vector<Block*> shadows;
  // Without blocks in flight, sleeps until wake() or the timeout.
  const auto most = std::max(1U, static_cast<unsigned>(carried_.size()));
  inner_->reap(shadows, held_.empty() ? std::min(wanted, most) : 1, patience);
  for (Block* block : shadows) {
    auto* shadow = static_cast<Shadow*>(block);
    shadow->original->result = outcome(*shadow);
    held_.push_back({shadow->original, shadow->fault.held_back, shadow->fault.reordered});
    carried_.erase(shadow);
  }
}

/// The result to report. Flips a bit in the memory of a read if planned.
long FaultyTransport::outcome(const Shadow& shadow) {
  const Fault& fault = shadow.fault;
  const bool whole = shadow.result == static_cast<long>(shadow.length);
  if (fault.torn && whole) {
    return static_cast<long>(std::min(shadow.original->length, fault.at_most));
  }
  if (shadow.result <= 0) return shadow.result;
  const std::size_t moved = std::min(static_cast<std::size_t>(shadow.result), fault.at_most);
  if (fault.flip && shadow.direction == Direction::read && moved > 0) {
    const std::uint64_t bit = *fault.flip % (moved * 8);
    shadow.data[bit / 8] ^= std::byte{1} << (bit % 8);
  }
  return static_cast<long>(moved);
}

void FaultyTransport::hand_back(std::vector<Block*>& finished) {
  const bool last = carried_.empty();
  const auto ready = [&](const DelayedBlock& held) { return held.reaps_left == 0 || last; };
  const auto count = std::ranges::count_if(held_, ready);
  std::vector<DelayedBlock> still_held;
  for (auto it = held_.rbegin(); it != held_.rend(); ++it) {
    const bool alone = it->reordered && count == 1 && !last;
    if (ready(*it) && !alone) {
      finished.push_back(it->block);
    } else {
      still_held.push_back({it->block, it->reaps_left - (ready(*it) ? 0 : 1), it->reordered});
    }
  }
  std::ranges::reverse(still_held);
  held_ = std::move(still_held);
}

std::unique_ptr<Transport> with_faults(std::unique_ptr<Transport> transport) {
  auto plan = faults_from_environment();
  if (!plan) return transport;
  log(LogLevel::warning, fmt::format("aio: injecting faults: {}", plan->text()));
  return std::make_unique<FaultyTransport>(std::move(transport), std::move(*plan));
}

}  // namespace ballast::aio
