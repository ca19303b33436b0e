#pragma once

#include <string>
#include <vector>

#include "ballast/core/units.h"

namespace ballast::schedule {

/// How fast matrix products of one kind of operation run with micro-batches of so many tokens.
struct CurvePoint {
  double tokens = 0.0;
  double flops_per_second = 0.0;
  friend bool operator==(const CurvePoint&, const CurvePoint&) = default;
};

/// Points by ascending tokens; between them the time per FLOP is interpolated in log(tokens),
/// outside the nearest point holds.
using Curve = std::vector<CurvePoint>;

/// What a machine does per second: measured on it (a calibration) or taken from a file. All rates
/// are what one rank gets while the other ranks of its node work too, each lane alone; what lanes
/// share is said beside them.
struct Rates {
  std::string name;  ///< "this machine", "one node of 8 H100"

  // Compute, in the training type.
  Curve forward;                          ///< a transformer layer
  Curve backward;                         ///< a transformer layer, recompute included
  Curve head;                             ///< the head in training, forward and backward
  double device_memory_per_second = 0.0;  ///< bytes: clearing, packing, embedding, device updates
  /// Of every operation before it does anything, unless it is enqueued behind another (is_queued).
  double launch_seconds = 0.0;

  // Update on the host.
  double update_per_second = 0.0;  ///< bytes of memory traffic (Operation::traffic)

  // Link: each direction alone, bytes per second.
  double upload_per_second = 0.0;
  double offload_per_second = 0.0;

  // NVMe, bytes per second: reading alone, writing alone, and both at once (their sum).
  double read_per_second = 0.0;
  double write_per_second = 0.0;
  double mixed_per_second = 0.0;
  double mixed_read_share = 0.5;    ///< of that, what reading gets; writing gets the rest
  double io_latency_seconds = 0.0;  ///< of every fetch and writeback, unless behind another

  // Between ranks: bytes per second that one rank receives in a collective.
  double fabric_per_second = 0.0;   ///< inside a node
  double network_per_second = 0.0;  ///< over several nodes
  unsigned ranks_per_node = 1;

  /// Cores that the lanes of the host device share; 0: they do not (a GPU computes). Then compute,
  /// update and copies run at full speed only as long as their threads together find cores.
  unsigned shared_cores = 0;
  unsigned compute_threads = 0;  ///< of the compute lane, when cores are shared
  unsigned update_threads = 0;   ///< of the update lane, when cores are shared
  double link_cores = 0.0;       ///< cores that a copy at full speed keeps busy
  double io_cores = 0.0;         ///< cores that a transfer at full speed keeps busy (checksums)

  /// Speed of compute with a copy, or a transfer, beside it, 1 for as fast as alone: what they cost
  /// it in cores, caches and memory. 0: only cores count.
  double compute_beside_copy = 0.0;
  double compute_beside_io = 0.0;
  unsigned corrections = 0;  ///< runs that have corrected what a calibration measured

  // What one rank may use, for machines that are not here; 0: not said.
  Bytes device_bytes = 0;
  Bytes host_bytes = 0;
  Bytes nvme_bytes = 0;
  double drive_writes_bytes = 0.0;  ///< rated life of a rank's drives in bytes written; 0: not said
  friend bool operator==(const Rates&, const Rates&) = default;
};

/// FLOP/s of `curve` at `tokens`. Throws Error(config) for a curve without points.
double rate_at(const Curve& curve, double tokens);

}  // namespace ballast::schedule
