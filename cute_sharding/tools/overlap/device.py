"""The time of a node on a device: the longer of its operations and of its bytes."""

from __future__ import annotations

from typing import Any, NamedTuple


class Device(NamedTuple):
    """How fast a device computes.

    Attributes:
        name: what it is called.
        flops: floating point operations in a second, by the bytes of an element.
        traffic: bytes that it reads and writes in a second.

    >>> DEVICES["h100"].traffic
    3350000000000.0
    """

    name: str
    flops: tuple[tuple[int, float], ...]
    traffic: float

    def seconds(self, op: Any) -> float:
        """The time of a node (a TimedOp of replaced/timeline.py)."""
        by_size = dict(self.flops)
        flops = by_size.get(op.itemsize, min(by_size.values()))
        return float(max(op.flops / flops, op.traffic / self.traffic))


# From data sheets: dense products, without sparsity; elements of four bytes as TF32.
DEVICES = {
    "a100": Device("A100", ((1, 624e12), (2, 312e12), (4, 156e12), (8, 19.5e12)), 2.039e12),
    "h100": Device("H100", ((1, 1979e12), (2, 989e12), (4, 494e12), (8, 67e12)), 3.35e12),
    "h200": Device("H200", ((1, 1979e12), (2, 989e12), (4, 494e12), (8, 67e12)), 4.8e12),
}
