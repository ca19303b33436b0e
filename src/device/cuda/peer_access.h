#pragma once

namespace ballast::device {

/// Enables direct copies between two GPUs, both ways, and copies a pattern to see whether they
/// arrive: behind some IOMMUs and PCIe switches (ACS), the driver allows them and they are lost.
/// Returns whether they are direct. Otherwise they pass through host memory, and a warning says why
/// if the driver had allowed them. Throws Error(device).
/// Source: CUDA Runtime API, "Peer Device Memory Access"; NCCL, "Troubleshooting", "PCI Access
/// Control Services".
bool enable_peer_access(int one, int other);

}  // namespace ballast::device
