#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/core/error.h"

namespace ballast::comm {

/// An error that every rank throws at the same place, so that one rank reports it and all can shut
/// down normally. collective_try() makes it from the errors of single ranks. A decision based on
/// values that all ranks have, such as the loss of a step, throws it directly.
class JointError : public Error {
 public:
  using Error::Error;
};

/// Name of this machine, for messages.
std::string host_name();

/// Runs `work` on every rank and compares the results. Collective; `work` may make collective
/// calls, but must not fail on one rank between two of them. If it fails on any rank, all ranks
/// throw the same JointError: the common message when all ranks have the same, otherwise that of
/// the first failed rank, prefixed with "rank 2 on HOST: ". Error(comm) and Error(interrupted) from
/// `work` are rethrown unchanged, since the ranks can no longer communicate. Without ranks
/// (nullptr), or with one, `work` is simply called.
void collective_try(Ranks* ranks, const std::function<void()>& work);

/// Returns rank 0's value of `here` on every rank. Use it for facts that ranks may see differently,
/// such as whether a file exists. Collective. Without ranks (nullptr), returns `here`.
bool decided_by_root(Ranks* ranks, bool here);

/// Something that every rank reads or computes with, and that must be equal on all ranks.
struct Identity {
  std::string name;     ///< identifies it on all ranks, such as "model.weights model.safetensors"
  std::string subject;  ///< how messages call it on this rank, such as the path of the file
  std::string content;  ///< compared: a value, or size and hash of a file
  std::string remedy;   ///< advice if it differs
  ErrorCategory category = ErrorCategory::data;
};

/// A difference between ranks, as an error with the category of its Identity.
struct Disagreement {
  ErrorCategory category = ErrorCategory::data;
  std::string message;
};

/// Compares the identities of all ranks and describes the first one, in the order of the lists,
/// that differs: "rank 1 on HOST: f1/model.safetensors differs from that of rank 0 on HOST
/// (CONTENT, not CONTENT); REMEDY". The rank that is named is one of the minority, or the higher
/// one of two. A rank whose list lacks a name differs too. Collective; every rank gets the same
/// result. Empty if all lists are equal, without ranks (nullptr), and with one.
std::optional<Disagreement> find_disagreement(Ranks* ranks, const std::vector<Identity>& mine);

/// Throws the JointError for find_disagreement(). Collective.
void require_agreement(Ranks* ranks, const std::vector<Identity>& mine);

/// Returns the `text` of every rank, by rank. Collective.
std::vector<std::string> gather_texts(Ranks& ranks, const std::string& text);

/// Ranks whose values differ from that of most ranks.
struct Minority {
  std::size_t reference = 0;        ///< the lowest rank with the most frequent value
  std::vector<std::size_t> others;  ///< ranks with other values, ascending
};

/// Compares one value per rank. Of two that are equally frequent, that of the lower rank counts.
template <class T>
Minority find_minority(const std::vector<T>& values) {
  std::map<T, std::size_t> frequency;
  for (const T& value : values) ++frequency[value];
  const auto right = std::max_element(
      values.begin(), values.end(),
      [&](const T& one, const T& other) { return frequency[one] < frequency[other]; });
  Minority found = {.reference = static_cast<std::size_t>(right - values.begin()), .others = {}};
  for (std::size_t rank = 0; rank < values.size(); ++rank) {
    if (values[rank] != *right) found.others.push_back(rank);
  }
  return found;
}

}  // namespace ballast::comm
