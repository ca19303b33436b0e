#pragma once

#include <cstdint>
#include <vector>

#include "ballast/schedule/build.h"

#include "src/schedule/placement_rules.h"

namespace ballast::schedule {

/// Every buffer of a run by its purpose. Ids index `buffers`; lists that a placement does not need
/// are empty.
struct Layout {
  std::vector<Buffer> buffers;

  // One per block. Purpose::evaluation has only the weights.
  std::vector<BufferId> weight_home;
  std::vector<BufferId> trained_home;             ///< see splits_home(), else kNoBuffer
  std::vector<std::vector<BufferId>> state_home;  ///< by sub-group
  /// For speculating blocks, else kNoBuffer: values before the last update; see Speculation.
  std::vector<BufferId> weight_undo;
  std::vector<std::vector<BufferId>> state_undo;  ///< by sub-group, or empty
  /// Packed, until its update: in the memory where the block is updated, or on NVMe; kNoBuffer if
  /// it is updated from staging (swaps_gradient() and eager).
  std::vector<BufferId> gradient;
  std::vector<BufferId> accumulator;  ///< one shared by all blocks in layer-major order
  std::vector<BufferId> statistics_device;
  std::vector<BufferId> statistics_host;

  // Buffers for data in transit.
  std::vector<BufferId> weight_slots;    ///< device, whole weights
  std::vector<BufferId> share_slots;     ///< device, this rank's share of split weights
  BufferId codes = kNoBuffer;            ///< device, gathered weight codes
  std::vector<BufferId> decoded;         ///< device, weights decoded for passes; at most one
  std::vector<BufferId> weight_staging;  ///< host
  std::vector<BufferId> state_staging;   ///< host, each as large as its largest content
  std::vector<BufferId> gradient_slots;  ///< device, packed gradients
  /// Device, for activations that leave it or, in an evaluation, for all.
  std::vector<BufferId> activation_slots;
  std::vector<BufferId> activation_staging;  ///< host, for activations on NVMe
  std::vector<BufferId> gradient_staging;    ///< host, for gradients on NVMe
  /// Host: weights and states on the device are filled and read through it, in pieces, outside of
  /// steps. A buffer of a step serves if one is large enough.
  BufferId passing_place = kNoBuffer;

  // One per micro-batch.
  std::vector<BufferId> batch_host;
  std::vector<BufferId> batch_device;
  std::vector<BufferId> flow;  ///< gradient of the activation between two blocks
  /// [block][micro-batch], block >= 1: the block's input between forward and backward pass. Empty
  /// for a head whose input uses activation_slots.
  std::vector<std::vector<BufferId>> input_home;
  /// [block][micro-batch]: empty for blocks that keep none.
  std::vector<std::vector<BufferId>> intermediates;

  /// [tile]: sums of the output matrix's gradient besides those of the blocks. Some tiles may share
  /// one. Empty if there are none.
  std::vector<BufferId> output_accumulator;
  /// [micro-batch]: see the roles; empty without tiles.
  std::vector<BufferId> rows;
  std::vector<BufferId> head_rows;  ///< those of the head
  std::vector<BufferId> row_sums;
  std::vector<BufferId> routing_device;    ///< [micro-batch], one after the other for all routers
  std::vector<BufferId> routing_of_ranks;  ///< the same of all ranks, if there are several
  std::vector<BufferId> router_totals;     ///< [micro-batch]
  /// By block: that of all micro-batches and ranks, of routers, else kNoBuffer.
  std::vector<BufferId> routing_host;
  // For a reference; empty without one.
  std::vector<BufferId> pairs;            ///< [micro-batch]
  std::vector<BufferId> reference_slots;  ///< device, activations on their way from block to block
  std::vector<BufferId> reference_rows;   ///< [micro-batch] of the head, if it has tiles
  BufferId arriving = kNoBuffer;          ///< device, gradients received from other ranks
  BufferId losses_device = kNoBuffer;
  BufferId losses_host = kNoBuffer;
  BufferId verdict = kNoBuffer;
  BufferId workspace = kNoBuffer;
};

Layout make_layout(const Workload& workload, const Placement& placement, const Options& options);

/// See sum_buffers().
std::vector<Buffer> merged_buffers(const Workload& workload, const Placement& placement,
                                   const Options& options);

}  // namespace ballast::schedule
