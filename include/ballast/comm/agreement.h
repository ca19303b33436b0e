#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/core/error.h"

namespace ballast::comm {

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

}  // namespace ballast::comm
