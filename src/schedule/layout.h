#pragma once

#include <vector>

#include "ballast/schedule/plan.h"

namespace ballast::schedule {

/// Every buffer of a run by its purpose. An id stands for a buffer in Layout::buffers; lists that a
/// placement does not need are empty.
struct Layout {
  std::vector<Buffer> buffers;

  // One per block.
  std::vector<BufferId> weight_home;
  std::vector<BufferId> state_home;
  std::vector<BufferId> gradient;     ///< packed, on the side where the block is updated
  std::vector<BufferId> accumulator;  ///< the same one for all blocks in layer-major order
  std::vector<BufferId> statistics_device;
  std::vector<BufferId> statistics_host;

  // Passing places.
  std::vector<BufferId> weight_slots;        ///< device, whole weights
  std::vector<BufferId> share_slots;         ///< device, this rank's share of split weights
  BufferId codes = kNoBuffer;                ///< device, codes of weights that are gathered
  std::vector<BufferId> weight_staging;      ///< host
  std::vector<BufferId> state_staging;       ///< host, each as large as what passes through it
  std::vector<BufferId> gradient_slots;      ///< device, packed gradients on their way
  std::vector<BufferId> activation_slots;    ///< device, for activations that leave it
  std::vector<BufferId> activation_staging;  ///< host, for activations on NVMe
  /// Host: what lives on the device passes through it, piece by piece, when it is filled or read
  /// outside of steps. One that a step uses too, where there is one of some size.
  BufferId passing_place = kNoBuffer;

  // One per micro-batch.
  std::vector<BufferId> batch_host;
  std::vector<BufferId> batch_device;
  std::vector<BufferId> flow;  ///< gradient of the activation between two blocks
  /// [block][micro-batch], block >= 1: the block's input where it waits for the backward pass. None
  /// for a head whose input passes through activation_slots.
  std::vector<std::vector<BufferId>> input_home;
  /// [block][micro-batch]: of layers that keep them.
  std::vector<std::vector<BufferId>> intermediates;

  BufferId tied_accumulator = kNoBuffer;
  BufferId arriving = kNoBuffer;  ///< device, what other ranks send to be summed
  BufferId losses_device = kNoBuffer;
  BufferId losses_host = kNoBuffer;
  BufferId verdict = kNoBuffer;
  BufferId workspace = kNoBuffer;
};

/// Whether the input of `block` leaves the device between forward and backward. The head consumes
/// its input at once, so that one never does.
bool input_leaves(const Placement& placement, std::uint32_t block);

/// Whether `block` is a layer whose intermediates stay on the device for the backward pass.
bool keeps_intermediates(const Placement& placement, std::uint32_t block);

/// The blocks whose states live on NVMe, in the order of their updates. Number i of them passes
/// through state_staging[i % count].
std::vector<std::uint32_t> swapped_blocks(const Placement& placement, const Options& options);

/// Of the input of a block on NVMe: whole pages.
Bytes swapped_input_bytes(const Workload& workload);

/// Lays out the buffers of `workload` under `placement`.
Layout make_layout(const Workload& workload, const Placement& placement, const Options& options);

}  // namespace ballast::schedule
