#pragma once

#include <cstdint>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/engine/blueprint.h"
#include "ballast/engine/home_piece.h"

namespace ballast::engine {

/// Compares the weights of which all sharers keep the whole, while a plan fills the homes. Sharers
/// that read different files would otherwise train different replicas without noticing.
class WholeWeights {
 public:
  /// Without `ranks` (nullptr), nothing is compared. Both arguments must outlive the object.
  WholeWeights(const Blueprint& blueprint, comm::Ranks* ranks);

  /// Returns a Perform that also hashes the filled pieces of whole weights.
  [[nodiscard]] Perform hashing(const Perform& perform);

  /// Throws a comm::JointError(data) that names a rank and a block if sharers have different
  /// weights. Collective.
  void require_equal() const;

 private:
  void add(const HomePiece& piece);

  const Blueprint& blueprint_;
  comm::Ranks* ranks_;
  std::vector<std::uint64_t> digests_;  ///< by block; 0 for blocks that were not filled
};

}  // namespace ballast::engine
