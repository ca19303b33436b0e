"""Report about an offloaded model: bytes per place, and counts of copies and uses."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Stay:
    """A tensor that stays on the device."""

    bytes: int
    reason: str


@dataclass(frozen=True)
class Report:
    """Bytes per place, and counts since offload(). str() is a table.

    `shared_bytes` are those of blocks that other processes of this machine read from the same memory. `waits` counts uses of a block that came before its copy had ended, as the host saw it, and
    `wait_seconds` the time for which the host waited: on a GPU, its streams wait instead. `visits`
    are uses of weights outside of their modules. Guesses are those of the next block. `units` are the
    bytes of each block, `nvme_units` those on NVMe. `staging_bytes` are host memory for
    copies between NVMe and the device. `read_waits` counts copies to the device that waited for NVMe.
    """

    device: str
    pool_bytes: int
    peak_bytes: int
    units: dict[str, int]
    pinned_bytes: int
    shared_bytes: int
    staying: dict[str, Stay]
    loads: int
    bytes_in: int
    bytes_out: int
    waits: int
    wait_seconds: float
    visits: int
    right_guesses: int
    wrong_guesses: int
    nvme_units: dict[str, int] = field(default_factory=dict)
    staging_bytes: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    read_waits: int = 0
    read_wait_seconds: float = 0.0

    @property
    def host_bytes(self) -> int:
        """Bytes of the blocks in host memory."""
        return sum(self.units.values()) - self.nvme_bytes

    @property
    def nvme_bytes(self) -> int:
        """Bytes of the blocks on NVMe."""
        return sum(self.nvme_units.values())

    @property
    def staying_bytes(self) -> int:
        return sum(stay.bytes for stay in self.staying.values())

    def __str__(self) -> str:
        reasons: dict[str, list[int]] = {}
        for stay in self.staying.values():
            reasons.setdefault(stay.reason, []).append(stay.bytes)
        in_host = len(self.units) - len(self.nvme_units)
        nvme = [("blocks on NVMe", f"{_size(self.nvme_bytes)} in {len(self.nvme_units)} blocks, through "
                                   f"{_size(self.staging_bytes)} of host memory"),
                ("read from NVMe", f"{_size(self.bytes_read)}, written {_size(self.bytes_written)}"),
                ("waits for NVMe", f"{self.read_waits}, {self.read_wait_seconds:.3f} s")]
        rows = [("blocks in host memory", f"{_size(self.host_bytes)} in {in_host} blocks, "
                                          f"{_size(self.pinned_bytes)} pinned, "
                                          f"{_size(self.shared_bytes)} shared"),
                *(nvme if self.nvme_units else ()),
                (f"for blocks on {self.device}", f"{_size(self.pool_bytes)}, at most "
                                                 f"{_size(self.peak_bytes)} in use"),
                *((f"stays: {reason}", f"{_size(sum(sizes))} in {len(sizes)} tensors")
                  for reason, sizes in sorted(reasons.items())),
                ("copies to the device", f"{self.loads}, {_size(self.bytes_in)}"),
                ("gradients to the host", _size(self.bytes_out)),
                ("waits for copies", f"{self.waits}, {self.wait_seconds:.3f} s"),
                ("uses outside of modules", str(self.visits)),
                ("guesses of the next block", f"{self.right_guesses} right, {self.wrong_guesses} wrong")]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:{width}}  {value}" for name, value in rows)


def _size(nbytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} bytes"
