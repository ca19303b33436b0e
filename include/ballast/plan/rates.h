#pragma once

#include <array>
#include <string>
#include <vector>

#include "ballast/core/attention_class.h"
#include "ballast/core/error.h"
#include "ballast/core/units.h"
#include "ballast/plan/plan.h"

namespace ballast::plan {

/// Speed of one kind of operation's matrix products at one micro-batch size.
struct CurvePoint {
  double tokens = 0.0;
  double flops_per_second = 0.0;
  friend bool operator==(const CurvePoint&, const CurvePoint&) = default;
};

/// Points by ascending tokens. The time per FLOP is interpolated in log(tokens) between points and
/// constant outside them.
using Curve = std::vector<CurvePoint>;

/// FLOP/s of one class of attention; 0: the curves of layers include it.
struct AttentionRate {
  double forward = 0.0;
  double backward = 0.0;
  bool assumed = false;  ///< set by complete()
  friend bool operator==(const AttentionRate&, const AttentionRate&) = default;
};

/// Speeds of a machine, measured on it (a calibration) or read from a file. All rates are for one
/// rank while the other ranks of its node also work, with one lane active at a time.
struct Rates {
  std::string name;  ///< "this machine", "one node of 8 H100"

  // Compute, in the training type.
  Curve forward;   ///< a transformer layer
  Curve backward;  ///< a transformer layer, including recomputation
  Curve head;      ///< the head in training, forward and backward
  /// By AttentionClass, with two matrix products in a forward pass and five in a backward pass. If
  /// given, the curves above are those of a layer without the pass of attention. Otherwise they
  /// hold for sequences like the measured ones.
  std::array<AttentionRate, kAttentionClassCount> attention{};
  /// Bytes of the activations that the products of adapters read and write (Operation). 0: the
  /// curves include these products.
  double adapter_per_second = 0.0;
  bool adapters_assumed = false;          ///< set by complete()
  double device_memory_per_second = 0.0;  ///< bytes: clearing, packing, embedding, device updates
  /// Delay before every operation, except one that was enqueued while another ran (is_queued).
  double launch_seconds = 0.0;

  // Update on the host.
  double update_per_second = 0.0;  ///< bytes of memory traffic (Operation::traffic)
  /// Bytes per second of host memory, read plus written, that updates, copies and transfers share.
  /// 0: not given, they do not slow each other down.
  double host_memory_per_second = 0.0;

  // Link: each direction alone, in bytes per second.
  double upload_per_second = 0.0;
  double offload_per_second = 0.0;
  /// Between two devices of a rank. 0: not given, the data pass through host memory.
  double peer_per_second = 0.0;

  // NVMe, in bytes per second: reading alone, writing alone, and the sum of both at once.
  double read_per_second = 0.0;
  double write_per_second = 0.0;
  double mixed_per_second = 0.0;
  double mixed_read_share = 0.5;    ///< share of reading in mixed_per_second
  double io_latency_seconds = 0.0;  ///< per fetch and writeback, unless enqueued in time

  // Between ranks: bytes per second that one rank receives in a collective.
  double fabric_per_second = 0.0;   ///< inside a node
  double network_per_second = 0.0;  ///< over several nodes
  unsigned ranks_per_node = 1;
  /// Devices that a rank may use together, each with the rates and the device memory here. 0: not
  /// given.
  unsigned devices = 0;

  /// Cores that the lanes of the host device share: compute, update and copies run at full speed
  /// only while there are enough cores for all of their threads. 0: not shared (a GPU computes).
  unsigned shared_cores = 0;
  unsigned compute_threads = 0;  ///< threads of the compute lane, if cores are shared
  unsigned update_threads = 0;   ///< threads of the update lane, if cores are shared
  double link_cores = 0.0;       ///< cores that a copy at full speed keeps busy
  double io_cores = 0.0;         ///< cores that a transfer at full speed keeps busy (checksums)

  /// Speed of compute during a copy, of compute and updates during a transfer, and of transfers
  /// during compute and updates, each relative to running alone. Includes the cost in cores, caches
  /// and memory. 0: not measured, only cores count.
  double compute_beside_copy = 0.0;
  double compute_beside_io = 0.0;
  double update_beside_io = 0.0;
  double io_beside_compute = 0.0;
  double io_beside_update = 0.0;
  unsigned corrections = 0;  ///< number of runs that have corrected the calibration
  /// Share of the CPU time that other work used during the measurement.
  double other_work = 0.0;
  /// Time by which the median of the repetitions exceeded the estimate from them, relative to the
  /// estimate; the largest of all measurements. A few percent on an idle machine. 0: not measured.
  double spread = 0.0;
  double measured_at = 0.0;  ///< seconds since 1970 (UTC); 0: unknown

  // Memory of one rank, for other machines than this one; 0: not given.
  Bytes device_bytes = 0;
  Bytes host_bytes = 0;
  Bytes nvme_bytes = 0;
  double drive_writes_bytes = 0.0;  ///< rated endurance of a rank's drives; 0: not given

  [[nodiscard]] AttentionRate& of(AttentionClass id) { return attention[index_of(id)]; }
  [[nodiscard]] const AttentionRate& of(AttentionClass id) const { return attention[index_of(id)]; }
  friend bool operator==(const Rates&, const Rates&) = default;
};

/// Returns the FLOP/s of `curve` at `tokens`. Throws Error(config) for a curve without points.
double rate_at(const Curve& curve, double tokens);

/// Share of the speed of a GPU's memory that products of adapters are assumed to reach.
inline constexpr double kAdapterShare = 0.6;

/// Gives classes of attention and adapters without rates those of slower kernels, derived from the
/// given ones (kAttentionClasses, `device_memory_per_second`), and marks them as assumed. Does
/// nothing for rates that a calibration has measured: their curves include what they lack.
void complete(Rates& rates);

/// The error for a rate that is needed and missing: the same config with other rates may work.
class MissingRate : public Error {
 public:
  using Error::Error;
};

/// Throws MissingRate with the key if `rates` omits what every run of `ranks` ranks needs: the
/// speed of the exchange between them.
void require_exchange_rates(const Rates& rates, std::uint64_t ranks);

/// Seconds of an operation if nothing else runs.
struct Cost {
  double lead = 0.0;  ///< launch and latency, before it uses a shared resource
  double work = 0.0;  ///< at full speed
  [[nodiscard]] double seconds() const { return lead + work; }
  /// Seconds if `lane` is never idle.
  [[nodiscard]] double seconds_in_turn(Lane lane) const {
    return is_queued(lane) ? work : seconds();
  }
};

/// Returns the cost of `operation`, one of `schedule`. Throws Error(config) with a rate that it
/// needs and `rates` omits.
Cost cost_of(const Operation& operation, const Schedule& schedule, const Rates& rates);

/// Throws Error(config) if `rates` omits how the lanes of `schedule` share disk and cores.
void check_sharing(const Schedule& schedule, const Rates& rates);

}  // namespace ballast::plan
