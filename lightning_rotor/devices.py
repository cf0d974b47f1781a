"""Kinds of devices: all that torch asks of each kind in another way. One class and one entry of ``KINDS`` for each.

Who adds a kind, such as Apple's MPS, derives a class from :class:`DeviceKind`, overrides what torch has for it (in
``torch.mps``), and enters it. A method that a kind does not override refuses it by name, at the moment when something
needs it: dropout that is recomputed with other random numbers, or a limit that nobody compares with anything, would
train on in silence.

Not by ``torch.accelerator``, which asks most of this of any device: it knows one kind in a process, it has no random
generators, and a part of it is younger than the oldest torch that this package supports.
"""

from __future__ import annotations

from abc import ABC
from typing import Any, NamedTuple

import torch

from lightning_rotor.errors import ProfilingError


class Levels(NamedTuple):
    """Bytes that a device's allocator has given out, the most of them, and the most that it has reserved."""

    allocated_bytes: int
    peak_bytes: int
    peak_reserved_bytes: int


class DeviceKind(ABC):
    """A kind of device. Devices are given to its methods, since a process may use several of a kind."""

    name: str
    """The ``type`` of its ``torch.device``."""

    block_bytes = 1
    """Its allocator counts in multiples of so many bytes."""

    trains = True
    """True if tensors have values there, so that models can be trained."""

    def lacks(self, feature: str) -> ProfilingError:
        """The error for a kind of device that something is missing for."""
        return ProfilingError(
            f"device {self.name!r} has no {feature} that this package knows of: expected the model, and all that it "
            f"computes, on {expected_kinds()}. To add it, override what is missing in lightning_rotor/devices.py"
        )

    # ---------------------------------------------------------------- devices

    def is_available(self) -> bool:
        """True if this machine has one, and this torch supports it."""
        raise self.lacks("question for whether it is available")

    def current_device(self) -> torch.device | None:
        """The device that this process computes on, if it is of this kind; None before it has touched any."""
        raise self.lacks("current device")

    def make_current(self, device: torch.device) -> None:
        """Let what this thread computes without naming a device run on this one."""
        raise self.lacks("current device")

    def model_name(self, device: torch.device) -> str:
        """The name of the hardware, by which saved measurements are told apart."""
        raise self.lacks("name of its hardware")

    # ---------------------------------------------------------------- random numbers

    @property
    def own_generator(self) -> str | None:
        """Name in messages and plan files of the generator that its operations draw from; None for the host's."""
        raise self.lacks("random generator")

    def generator_state(self, device: torch.device) -> torch.Tensor:
        """The state of the device's default generator."""
        raise self.lacks("state of its random generator")

    def set_generator_state(self, device: torch.device, state: torch.Tensor) -> None:
        """Set the device's default generator back to an earlier state."""
        raise self.lacks("state of its random generator")

    def seed(self, device: torch.device, seed: int) -> None:
        """Seed the device's default generator."""
        raise self.lacks("seed of its random generator")

    # ---------------------------------------------------------------- settings

    @property
    def precision_backend(self) -> str | None:
        """The library whose precision of float32 torch sets under this name; None if it sets none."""
        raise self.lacks("backend whose precision can be set")

    # ---------------------------------------------------------------- memory

    @property
    def has_own_memory(self) -> bool:
        """True if an allocation beyond its memory fails. The host swaps, or the system kills a process."""
        raise self.lacks("statement about its memory")

    @property
    def tells_allocated(self) -> bool:
        """True if its allocator knows at any time how much it has given out."""
        raise self.lacks("count of allocated bytes")

    def allocated_bytes(self, device: torch.device) -> int:
        """Bytes that its allocator has given out."""
        raise self.lacks("count of allocated bytes")

    def reserved_bytes(self, device: torch.device) -> int:
        """Bytes that its allocator has taken from the driver, blocks that wait for another use included."""
        raise self.lacks("count of reserved bytes")

    def levels(self, device: torch.device) -> Levels:
        """Levels of its allocator, now and the highest since :meth:`reset_peaks`, in one question."""
        raise self.lacks("highest count of allocated bytes")

    def reset_peaks(self, device: torch.device) -> None:
        """Let the highest counts begin at what is allocated now."""
        raise self.lacks("highest count of allocated bytes")

    def driver_memory(self, device: torch.device) -> tuple[int, int]:
        """Bytes that no process uses, and bytes that the device has."""
        raise self.lacks("count of free bytes")

    def process_share(self, device: torch.device) -> float:
        """The part of the device's memory that the user lets this process have, from 0 to 1."""
        raise self.lacks("limit for a process")

    def empty_cache(self) -> None:
        """Give unused blocks back to the driver."""
        raise self.lacks("cache that can be emptied")

    # ---------------------------------------------------------------- time

    def time_point(self, device: torch.device) -> Any:
        """The moment at which the device gets to what this thread asks of it now."""
        raise self.lacks("clock")

    def seconds_between(self, start: Any, end: Any) -> float:
        """Seconds from one point in time to another; waits for the later one."""
        raise self.lacks("clock")


class Host(DeviceKind):
    """The CPU. Its free memory is the machine's, see ``memory``; its allocator tells blocks to a profiler alone."""

    name = "cpu"
    precision_backend = "mkldnn"
    own_generator = None
    has_own_memory = False
    tells_allocated = False

    def is_available(self) -> bool:
        return True

    def current_device(self) -> None:
        return None

    def make_current(self, device: torch.device) -> None:
        pass

    def model_name(self, device: torch.device) -> str:
        return self.name

    def empty_cache(self) -> None:
        pass


class Cuda(DeviceKind):
    """GPUs of NVIDIA, and of AMD under the same name."""

    name = "cuda"
    precision_backend = "cuda"
    own_generator = "torch's CUDA generator"
    has_own_memory = True
    tells_allocated = True
    # kMinBlockSize in c10/cuda/CUDACachingAllocator.cpp.
    block_bytes = 512

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def current_device(self) -> torch.device | None:
        # A process that has not touched CUDA must not begin to: it takes memory, and breaks later forks.
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            return torch.device(self.name, torch.cuda.current_device())
        return None

    def make_current(self, device: torch.device) -> None:
        torch.cuda.set_device(device)

    def model_name(self, device: torch.device) -> str:
        return torch.cuda.get_device_name(device)

    def generator_state(self, device: torch.device) -> torch.Tensor:
        return torch.cuda.get_rng_state(device)

    def set_generator_state(self, device: torch.device, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, device)

    def seed(self, device: torch.device, seed: int) -> None:
        # The function takes no device.
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)

    def allocated_bytes(self, device: torch.device) -> int:
        return self.levels(device).allocated_bytes

    def reserved_bytes(self, device: torch.device) -> int:
        return torch.cuda.memory_reserved(device)

    def levels(self, device: torch.device) -> Levels:
        # ``torch.cuda.memory_allocated`` and its like flatten and sort 160 figures for each answer: 0.1 to 0.5 ms
        # beside an H200, and a watched step of a ResNet-18 asked 75 times.
        statistics = torch.cuda.memory_stats_as_nested_dict(device)
        # Nothing has used the device yet.
        if not statistics:
            return Levels(0, 0, 0)
        allocated = statistics["allocated_bytes"]["all"]
        return Levels(allocated["current"], allocated["peak"], statistics["reserved_bytes"]["all"]["peak"])

    def reset_peaks(self, device: torch.device) -> None:
        torch.cuda.reset_peak_memory_stats(device)

    def driver_memory(self, device: torch.device) -> tuple[int, int]:
        # The driver's own figures, in which other processes on the device count.
        return torch.cuda.mem_get_info(device)

    def process_share(self, device: torch.device) -> float:
        return torch.cuda.get_per_process_memory_fraction(device)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def time_point(self, device: torch.device) -> torch.cuda.Event:
        # The host runs ahead of the device, so its own clock would time the asking.
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def seconds_between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        # An event that the device has not reached yet has no time. torch tells milliseconds.
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


class Shapes(DeviceKind):
    """``meta``: tensors that have shapes and no values, on which estimates and dry runs compute."""

    name = "meta"
    trains = False
    precision_backend = None
    own_generator = None
    has_own_memory = False
    tells_allocated = False

    def current_device(self) -> None:
        return None

    def model_name(self, device: torch.device) -> str:
        return self.name


HOST, CUDA = Host(), Cuda()
KINDS: dict[str, DeviceKind] = {kind.name: kind for kind in (HOST, CUDA, Shapes())}
"""The kinds that this package knows, by the ``type`` of their devices."""

TRAINING = tuple(name for name, kind in KINDS.items() if kind.trains)
"""Types of the devices on which models can be trained, the host's first."""

PRECISION_BACKENDS = tuple(kind.precision_backend for kind in KINDS.values() if kind.precision_backend is not None)
"""Libraries whose precision of float32 can be set."""

# Of the kinds above alone: models on others are refused anyway.
AUTOCASTING = tuple(name for name in KINDS if torch.amp.is_autocast_available(name))
"""Types of the devices for which torch has autocast."""


class _Unknown(DeviceKind):
    """A kind that is not in :data:`KINDS`. It lacks everything."""

    def __init__(self, name: str) -> None:
        self.name = name


def kind_of(device: torch.device) -> DeviceKind:
    """The kind of a device. One that is not known refuses all that it is asked for, with ``ProfilingError``."""
    kind = KINDS.get(device.type)
    return _Unknown(device.type) if kind is None else kind


def block_bytes_of(type_: str) -> int:
    """Bytes in whose multiples the allocator of a type of device counts; 1 for a type that is not known."""
    kind = KINDS.get(type_)
    return 1 if kind is None else kind.block_bytes


def device_in_use() -> torch.device | None:
    """The device besides the host that this process computes on; None if it has not touched any."""
    for kind in KINDS.values():
        device = kind.current_device()
        if device is not None:
            return device
    return None


def expected_kinds() -> str:
    """The types of devices that models can be trained on, as messages spell them."""
    return " or ".join(repr(name) for name in TRAINING)
