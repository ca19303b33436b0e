#include "ballast/comm/agreement.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

#include <fmt/format.h>

#include "ballast/comm/collective_try.h"

#include "src/comm/gathered_texts.h"
#include "src/comm/minority.h"

namespace ballast::comm {
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
