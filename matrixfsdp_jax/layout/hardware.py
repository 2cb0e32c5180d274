"""Devices as estimates know them: peak, memory, and the bandwidth near and far."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """A device and its network: enough for an estimate, not for a promise.

    Attributes:
      name: how reports call it.
      flops: peak of bfloat16 matrix products, FLOPs per second.
      memory: bytes of a device; None for no limit.
      near: bytes per second that a device receives within a domain.
      far: the same beyond it.
      domain: devices that the fast network joins.
      efficiency: the part of the peak that updates reach.
    """

    name: str
    flops: float
    memory: int | None
    near: float
    far: float
    domain: int
    efficiency: float = 0.65

    def bandwidth(self, span: int) -> float:
        """Bytes per second in a collective whose devices lie within ``span`` neighbours."""
        return self.near if span <= self.domain else self.far


# From the vendors' data sheets. GPUs: NVLink in one direction, and one adapter of 400 Gbit/s per
# GPU. TPUs: both links of one torus axis, and a chip's share of the data center network.
HARDWARE: dict[str, Hardware] = {
    each.name: each
    for each in (
        Hardware("h100", 989e12, 80 * 10**9, 450e9, 50e9, 8),
        Hardware("h200", 989e12, 141 * 10**9, 450e9, 50e9, 8),
        Hardware("v5e", 197e12, 16 * 10**9, 100e9, 3.125e9, 256),
        Hardware("v5p", 459e12, 95 * 10**9, 200e9, 6.25e9, 8960),
        Hardware("v6e", 918e12, 32 * 10**9, 200e9, 12.5e9, 256),
        # Devices simulated on one machine: orders of magnitude only.
        Hardware("cpu", 100e9, None, 5e9, 5e9, 10**6),
    )
}


def hardware(which: str | Hardware) -> Hardware:
    """The record of a device, which may be given itself.

    Raises:
      ValueError: if there is none of that name; it lists the known ones.
    """
    if isinstance(which, Hardware):
        return which
    if which not in HARDWARE:
        raise ValueError(f"unknown hardware {which!r}; known are {', '.join(HARDWARE)}")
    return HARDWARE[which]
