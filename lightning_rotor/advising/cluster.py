"""Devices and the links between them, with figures of data sheets.

A collective goes around rings of all its processes. Inside of a node each device sends on its own link (NVLink, or
PCIe); rings over several nodes are as slow as the network cards of a node's devices together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lightning_rotor.errors import AdviceError
from lightning_rotor.pipeline.partition import Link
from lightning_rotor.profiling.accelerators import GPUS, Accelerator
from lightning_rotor.units import is_positive_integer

# The part of a data sheet's figure that NCCL's large messages reach.
_LINK_EFFICIENCY = 0.8
# From the start of a message to that of its arrival: a kernel of NCCL and a hop, and of the network also its switches.
_LATENCY_SECONDS = 1e-5
_NETWORK_LATENCY_SECONDS = 2e-5


class _Figures(NamedTuple):
    """Bytes per second of one device in one direction, inside of a node and to other nodes."""

    link: float
    network: float


# One direction is half of what data sheets give for NVLink ("900 GB/s") and PCIe ("64 GB/s"), NVIDIA's of the GPU.
# The network is that of NVIDIA's DGX with it, by its data sheet, per GPU: DGX B200, H100 and H200 have 400 Gb/s
# InfiniBand for each, DGX A100 200 Gb/s for each, DGX-1 four cards of 100 Gb/s for eight V100. GPUs in no DGX are given
# 100 Gb/s for four of them, an assumption about common servers: users measure theirs (``network``).
_SERVER_NETWORK = 12.5e9 / 4
_LINKS = {
    "B200": _Figures(900e9, 50e9),
    "H200": _Figures(450e9, 50e9),
    "GH200": _Figures(450e9, 50e9),
    "H100": _Figures(450e9, 50e9),
    "H100-PCIe": _Figures(64e9, _SERVER_NETWORK),
    "A100-80GB": _Figures(300e9, 25e9),
    "A100-40GB": _Figures(300e9, 25e9),
    "L40S": _Figures(32e9, _SERVER_NETWORK),
    "L4": _Figures(32e9, _SERVER_NETWORK),
    "A10G": _Figures(32e9, _SERVER_NETWORK),
    "V100-32GB": _Figures(150e9, 6.25e9),
    "V100-16GB": _Figures(150e9, 6.25e9),
    "T4": _Figures(16e9, _SERVER_NETWORK),
    "RTX-5090": _Figures(64e9, _SERVER_NETWORK),
    "RTX-4090": _Figures(32e9, _SERVER_NETWORK),
    "RTX-3090": _Figures(32e9, _SERVER_NETWORK),
}


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of as many devices each.

    Attributes:
        gpu: Each device.
        devices: In a node.
        nodes: Of them.
        link: Between devices of a node, in each direction.
        network: Between devices of different nodes, in each direction.
    """

    gpu: Accelerator
    devices: int
    nodes: int
    link: Link
    network: Link

    @classmethod
    def of(
        cls,
        gpu: str,
        devices: int,
        nodes: int = 1,
        *,
        link: float | None = None,
        network: float | None = None,
    ) -> Cluster:
        """Devices by the name of their GPU; ``link`` and ``network`` are measured bytes per second, instead."""
        # In any case: a command line is typed by hand.
        names = {name.lower(): name for name in GPUS}
        model = names.get(gpu.lower())
        if model is None:
            raise AdviceError(f"gpu {gpu!r} is unknown: expected one of {', '.join(GPUS)}")
        for name, number in (("devices", devices), ("nodes", nodes)):
            if not is_positive_integer(number):
                raise AdviceError(f"{name} is {number!r}: expected a positive integer")
        for name, speed in (("link", link), ("network", network)):
            if speed is not None and not speed > 0:
                raise AdviceError(f"{name} is {speed!r}: expected measured bytes per second, such as 300e9")
        figures = _LINKS[model]
        # What was measured has its losses in it already.
        link_speed = link or _LINK_EFFICIENCY * figures.link
        network_speed = network or _LINK_EFFICIENCY * figures.network
        return cls(
            GPUS[model],
            devices,
            nodes,
            Link(link_speed, _LATENCY_SECONDS),
            Link(network_speed, _NETWORK_LATENCY_SECONDS),
        )

    @property
    def size(self) -> int:
        """Number of all devices."""
        return self.devices * self.nodes

    def between_neighbours(self, devices: int) -> Link:
        """The slowest link between so many devices with successive numbers, the first of which is a node's first."""
        return self.link if self._in_a_node(devices) else self.network

    def _in_a_node(self, devices: int) -> bool:
        # Where they do not divide a node's, some group of so many lies on two nodes, and every step waits for it.
        return devices <= self.devices and self.devices % devices == 0

    def _collective_link(self, processes: int, apart: int) -> Link:
        """Speed at which a collective sends, whose processes have every ``apart``-th device."""
        if self._in_a_node(processes * apart):
            return self.link
        # Each process of a node sends a part of the messages through its own network card.
        in_a_node = max(1, self.devices // apart)
        speed = min(self.link.bytes_per_second, in_a_node * self.network.bytes_per_second)
        return Link(speed, self.network.latency_seconds)

    def gather_seconds(self, size_bytes: float, processes: int, *, apart: int = 1) -> float:
        """Seconds in which processes bring their parts of ``size_bytes`` together, or spread sums over themselves."""
        if processes == 1 or not size_bytes:
            return 0.0
        # Around a ring, ``n - 1`` messages of an n-th each, one after the other.
        link = self._collective_link(processes, apart)
        return (processes - 1) * (link.latency_seconds + size_bytes / processes / link.bytes_per_second)

    def sum_seconds(self, size_bytes: float, processes: int, *, apart: int = 1) -> float:
        """Seconds in which all processes get the sum of their ``size_bytes``: spread, then brought together."""
        return 2 * self.gather_seconds(size_bytes, processes, apart=apart)
