#include "ballast/comm/agreement.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <unistd.h>

namespace ballast::comm {

namespace {

/// Result of one rank's work, gathered first because its size is fixed.
struct RankOutcome {
  std::uint64_t category = 0;
  std::uint64_t failed = 0;  ///< 1 if it failed
};

/// Returns the error that `work` throws, if any. Errors that ranks cannot compare are rethrown.
std::optional<Error> error_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const JointError&) {
    throw;
  } catch (const Error& error) {
    const auto category = error.category();
    if (category == ErrorCategory::comm || category == ErrorCategory::interrupted) throw;
    return error;
  } catch (const std::bad_alloc&) {
    return Error(ErrorCategory::memory, "out of memory");
  } catch (const std::exception& error) {
    return Error(ErrorCategory::state, error.what());
  }
  return std::nullopt;
}

/// Throws the JointError for `outcomes`, which contain at least one failure. Collective.
void throw_joint(Ranks& ranks, const std::vector<RankOutcome>& outcomes, const std::string& mine) {
  const std::vector<std::string> messages = gather_texts(ranks, mine);
  const std::vector<std::string> hosts = gather_texts(ranks, host_name());
  const auto failed = std::find_if(outcomes.begin(), outcomes.end(),
                                   [](const RankOutcome& o) { return o.failed != 0; });
  const auto first = static_cast<std::size_t>(failed - outcomes.begin());
  const auto category = static_cast<ErrorCategory>(failed->category);
  const std::string& message = messages[first];
  const bool common = std::all_of(messages.begin(), messages.end(),
                                  [&](const std::string& other) { return other == message; });
  if (common) throw JointError(category, message);
  throw JointError(category, fmt::format("rank {} on {}: {}", first, hosts[first], message));
}

}  // namespace

std::vector<std::string> gather_texts(Ranks& ranks, const std::string& text) {
  const std::uint64_t own = text.size();
  std::vector<std::uint64_t> sizes(ranks.world());
  ranks.all_gather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(sizes)));
  const std::uint64_t width = *std::max_element(sizes.begin(), sizes.end());
  std::string part = text;
  part.resize(width);
  std::string whole(width * ranks.world(), '\0');
  ranks.all_gather(std::as_bytes(std::span(part)), std::as_writable_bytes(std::span(whole)));
  std::vector<std::string> texts;
  for (std::size_t r = 0; r < ranks.world(); ++r) {
    texts.push_back(whole.substr(r * width, sizes[r]));
  }
  return texts;
}

std::string host_name() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0 || name[0] == '\0') return "unknown host";
  return name.data();
}

void collective_try(Ranks* ranks, const std::function<void()>& work) {
  if (ranks == nullptr || ranks->world() == 1) {
    work();
    return;
  }
  const std::optional<Error> error = error_of(work);
  RankOutcome mine;
  if (error) mine = {static_cast<std::uint64_t>(error->category()), 1};
  std::vector<RankOutcome> all(ranks->world());
  try {
    ranks->all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
    const bool fine =
        std::all_of(all.begin(), all.end(), [](const RankOutcome& o) { return o.failed == 0; });
    if (!fine) throw_joint(*ranks, all, error ? error->what() : "");
  } catch (const JointError&) {
    throw;
  } catch (const Error&) {
    if (error) throw Error(*error);  // more specific than a timeout
    throw;
  }
}

bool decided_by_root(Ranks* ranks, bool here) {
  return ranks == nullptr ? here : !ranks->broadcast(here ? "yes" : "").empty();
}

namespace {

/// Appends `field` so that FieldReader finds its end, whatever characters it has.
void append(std::string& text, std::string_view field) {
  const std::uint64_t size = field.size();
  text.append(reinterpret_cast<const char*>(&size), sizeof size);
  text.append(field);
}

class FieldReader {
 public:
  explicit FieldReader(std::string_view text) : rest_(text) {}
  [[nodiscard]] bool at_end() const { return rest_.empty(); }
  std::string next() {
    std::uint64_t size = 0;
    std::memcpy(&size, rest_.data(), sizeof size);
    std::string field(rest_.substr(sizeof size, size));
    rest_.remove_prefix(sizeof size + size);
    return field;
  }

 private:
  std::string_view rest_;
};

/// The part that must be equal.
std::string compared(const std::vector<Identity>& list) {
  std::string text;
  for (const Identity& one : list) {
    append(text, one.name);
    append(text, one.content);
  }
  return text;
}

/// The list of a rank, with its host.
struct Report {
  std::string host;
  std::vector<Identity> list;

  [[nodiscard]] const Identity* find(const std::string& name) const {
    const auto found = std::find_if(list.begin(), list.end(),
                                    [&](const Identity& one) { return one.name == name; });
    return found == list.end() ? nullptr : &*found;
  }
};

std::string encode(const Report& report) {
  std::string text;
  append(text, report.host);
  for (const Identity& one : report.list) {
    for (const std::string* field : {&one.name, &one.subject, &one.content, &one.remedy}) {
      append(text, *field);
    }
    append(text, std::to_string(static_cast<int>(one.category)));
  }
  return text;
}

Report decode(const std::string& text) {
  FieldReader reader(text);
  Report report = {.host = reader.next(), .list = {}};
  while (!reader.at_end()) {
    Identity one = {.name = reader.next(),
                    .subject = reader.next(),
                    .content = reader.next(),
                    .remedy = reader.next()};
    one.category = static_cast<ErrorCategory>(std::stoi(reader.next()));
    report.list.push_back(std::move(one));
  }
  return report;
}

/// Names the ranks after the first one, which also differ.
std::string describe_more(const std::vector<std::size_t>& ranks) {
  constexpr std::size_t kNamed = 8;
  if (ranks.size() == 1) return "";
  std::string text = ranks.size() == 2 ? "; so does rank" : "; so do ranks";
  for (std::size_t i = 1; i < std::min(ranks.size(), kNamed); ++i) {
    text += (i == 1 ? " " : ", ") + std::to_string(ranks[i]);
  }
  return text + (ranks.size() > kNamed ? ", ..." : "");
}

/// Describes the difference in `name`, if there is one.
std::optional<Disagreement> compare(const std::vector<Report>& reports, const std::string& name) {
  constexpr const char* kMissing = "missing";
  std::vector<std::string> contents;
  for (const Report& report : reports) {
    const Identity* const one = report.find(name);
    contents.push_back(one == nullptr ? kMissing : one->content);
  }
  const auto [reference, others] = find_minority(contents);
  if (others.empty()) return std::nullopt;
  const std::size_t rank = others.front();
  const Identity* shown = reports[rank].find(name);
  if (shown == nullptr) shown = reports[reference].find(name);
  return Disagreement{
      shown->category,
      fmt::format("rank {} on {}: {} differs from that of rank {} on {} ({}, not {}){}; {}", rank,
                  reports[rank].host, shown->subject, reference, reports[reference].host,
                  contents[rank], contents[reference], describe_more(others), shown->remedy)};
}

}  // namespace

std::optional<Disagreement> find_disagreement(Ranks* ranks, const std::vector<Identity>& mine) {
  if (ranks == nullptr || ranks->world() == 1) return std::nullopt;
  const std::string own = compared(mine);
  const std::byte same{ranks->broadcast(own) == own ? std::uint8_t{1} : std::uint8_t{0}};
  std::vector<std::byte> all(ranks->world());
  ranks->all_gather(std::span(&same, 1), all);
  if (std::find(all.begin(), all.end(), std::byte{0}) == all.end()) return std::nullopt;
  std::vector<Report> reports;
  for (const std::string& text : gather_texts(*ranks, encode({host_name(), mine}))) {
    reports.push_back(decode(text));
  }
  for (const Report& report : reports) {
    for (const Identity& one : report.list) {
      if (auto found = compare(reports, one.name)) return found;
    }
  }
  return std::nullopt;  // only their order differs
}

void require_agreement(Ranks* ranks, const std::vector<Identity>& mine) {
  if (const auto found = find_disagreement(ranks, mine)) {
    throw JointError(found->category, found->message);
  }
}

}  // namespace ballast::comm
