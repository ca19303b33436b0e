#include "ballast/comm/collective_try.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <new>
#include <optional>
#include <span>
#include <vector>

#include <fmt/format.h>
#include <unistd.h>

namespace ballast::comm {
namespace {

/// Result of one rank's work; gathered first because its size is fixed.
struct RankOutcome {
  std::uint64_t category = 0;
  std::uint64_t message_bytes = 0;  ///< 0: it succeeded
  std::uint64_t host_bytes = 0;
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

/// Returns message and host name of every rank, concatenated and padded to `width` bytes.
std::vector<std::string> gather_texts(Ranks& ranks, const std::string& text, std::size_t width) {
  std::string part = text;
  part.resize(width);
  std::string whole(width * ranks.world(), '\0');
  ranks.all_gather(std::as_bytes(std::span(part)), std::as_writable_bytes(std::span(whole)));
  std::vector<std::string> texts;
  for (std::size_t r = 0; r < ranks.world(); ++r) texts.push_back(whole.substr(r * width, width));
  return texts;
}

/// Throws the JointError for `outcomes`, which contain at least one failure. Collective.
void throw_joint(Ranks& ranks, const std::vector<RankOutcome>& outcomes, const std::string& text) {
  std::size_t width = 0;
  for (const auto& o : outcomes) width = std::max(width, o.message_bytes + o.host_bytes);
  const std::vector<std::string> texts = gather_texts(ranks, text, width);
  const auto message = [&](std::size_t r) { return texts[r].substr(0, outcomes[r].message_bytes); };
  const auto failed = std::find_if(outcomes.begin(), outcomes.end(),
                                   [](const RankOutcome& o) { return o.message_bytes > 0; });
  const auto first = static_cast<std::size_t>(failed - outcomes.begin());
  bool common = true;
  for (std::size_t r = 0; r < outcomes.size(); ++r) common = common && message(r) == message(first);
  const auto category = static_cast<ErrorCategory>(failed->category);
  if (common) throw JointError(category, message(first));
  const std::string host = texts[first].substr(failed->message_bytes, failed->host_bytes);
  throw JointError(category, fmt::format("rank {} on {}: {}", first, host, message(first)));
}

}  // namespace

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
  const std::string host = host_name();
  const std::string message = error ? error->what() : "";
  RankOutcome mine;
  if (error) mine = {static_cast<std::uint64_t>(error->category()), message.size(), host.size()};
  std::vector<RankOutcome> all(ranks->world());
  try {
    ranks->all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
    const bool fine = std::all_of(all.begin(), all.end(),
                                  [](const RankOutcome& o) { return o.message_bytes == 0; });
    if (!fine) throw_joint(*ranks, all, error ? message + host : "");
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

}  // namespace ballast::comm
