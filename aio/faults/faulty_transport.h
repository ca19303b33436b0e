#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "aio/transport.h"

namespace ballast::aio {

/// Faults of one start of one block. Several can apply; a hang takes precedence over an error, and
/// an error over the rest.
struct Fault {
  /// The block fails with this errno and is not carried out.
  int error_number = 0;
  /// Upper limit of the reported length; whole pages are transferred, as direct I/O requires.
  std::size_t at_most = std::numeric_limits<std::size_t>::max();
  /// Number of reaps before this block is returned.
  unsigned held_back = 0;
  /// Returned after a block that finished later.
  bool reordered = false;
  /// Index of the bit to flip in the data read, modulo the number of bits.
  std::optional<std::uint64_t> flip;
  /// A write that reports success, but only its first half (whole pages) reaches the file.
  bool torn = false;
  /// A write that reports success, but nothing reaches the file.
  bool lost = false;
  /// The block is neither executed nor returned.
  bool hang = false;
};

/// Chooses the faults of blocks. Called for every start of a block, including retries and
/// continuations; the same sequence of starts gets the same faults.
class FaultPlan {
 public:
  /// Reads "eio:on=write:after=100:times=1,late:reaps=3" (aio/README.md). Throws Error(config) that
  /// names the wrong word.
  explicit FaultPlan(std::string_view text);

  Fault operator()(const Block& block);

  [[nodiscard]] const std::string& text() const { return text_; }

 private:
  enum class Kind { short_transfer, error, late, reorder, flip, torn, lost, hang };
  struct KindName;
  static const std::vector<KindName>& kinds();

  /// One of the comma-separated faults and its counters.
  struct Rule {
    Kind kind = Kind::error;
    int error_number = 0;
    bool reads = true;
    bool writes = true;
    std::uint64_t after = 0;
    std::uint64_t every = 1;
    std::uint64_t times = std::numeric_limits<std::uint64_t>::max();
    std::optional<Bytes> bytes;
    unsigned reaps = 1;
    std::uint64_t seed = 1;
    double percent = 100.0;
    std::uint64_t seen = 0;
    std::uint64_t hits = 0;
  };
  static Rule parse_rule(std::string_view text);
  static void parse_key(std::string_view text, std::string_view kind, Rule& rule);
  static void parse_direction(std::string_view value, std::string_view kind, Rule& rule);
  static bool hits(Rule& rule, const Block& block);
  static void inflict(const Rule& rule, const Block& block, Fault& fault);

  std::string text_;
  std::vector<Rule> rules_;
};

/// The plan in the environment variable BALLAST_IO_FAULTS, if it is set and not empty. Throws
/// Error(config).
std::optional<FaultPlan> faults_from_environment();

/// Wraps another transport and injects faults, which `plan` chooses on the owner thread at every
/// start. Blocks that finish together come back in reverse order.
class FaultyTransport final : public Transport {
 public:
  using Plan = std::function<Fault(const Block&)>;

  FaultyTransport(std::unique_ptr<Transport> inner, Plan plan);

  void start(Block& block) override;
  void reap(std::vector<Block*>& finished, unsigned wanted,
            std::chrono::milliseconds patience) override;
  void wake() noexcept override { inner_->wake(); }

  /// Executes blocks that hang and disables hangs from then on. Thread-safe.
  void end_hangs() noexcept;

 private:
  /// Passed to the inner transport instead of a block.
  struct Shadow : Block {
    Block* original = nullptr;
    Fault fault;
  };
  /// A finished block that is not returned yet.
  struct DelayedBlock {
    Block* block = nullptr;
    unsigned reaps_left = 0;
    bool reordered = false;
  };

  void carry(Block& block, const Fault& fault);
  void resume_hung();
  void reap_inner(unsigned wanted, std::chrono::milliseconds patience);
  static long outcome(const Shadow& shadow);
  void hand_back(std::vector<Block*>& finished);

  Plan plan_;
  std::unordered_map<Shadow*, std::unique_ptr<Shadow>> carried_;
  std::vector<DelayedBlock> held_;
  std::vector<Block*> hung_;
  std::atomic<bool> hangs_ended_ = false;
  std::unique_ptr<Transport> inner_;
};

}  // namespace ballast::aio
