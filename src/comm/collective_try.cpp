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

#include "src/comm/gathered_texts.h"

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

}  // namespace ballast::comm
