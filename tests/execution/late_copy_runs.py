"""Steps that move things on the simulated device, as it is and with one wait missing: prints JSON of what kept the bits of plain training.

Memory is overwritten at the moment at which it is given back, so what comes too late reads junk.
"""

from __future__ import annotations

import ctypes
import gc
import json
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.random_chains import random_moves, random_schedule
from lightning_rotor.execution import moving
from lightning_rotor.execution.executor import Executor
from lightning_rotor.execution.pinned_memory import PinnedCopy, PinnedMemory
from lightning_rotor.profiling import profile_chain
from lightning_rotor.schedule import Schedule
from lightning_rotor.stages.sequential import sequential_stages

GPU = torch.device("cuda", 0)
JUNK = 0xFF


def noticed(what: Any, *_: Any) -> weakref.ref[Any]:
    """In the place of ``ref``: memory of a storage becomes junk when the last one gives it back."""
    if not isinstance(what, torch.UntypedStorage):
        return weakref.ref(what)
    address, size = what.data_ptr(), what.nbytes()

    def overwrite(_: Any) -> None:
        # As an operator of the stream that computes, behind what that waits for.
        ctypes.CDLL(None).simulated_computes(ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        ctypes.memset(address, JUNK, size)

    return weakref.ref(what, overwrite)


class Task:
    """A network whose moves are checked."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(3):
            layers += [nn.Linear(48, 48), nn.GELU(), nn.Dropout(0.1)]
        self.net = nn.Sequential(*layers, nn.Linear(48, 3)).to(GPU)
        self.batch = torch.randn(96, 48, device=GPU)
        self.profile = profile_chain(sequential_stages(self.net), self.batch, repeats=1)
        self.plain = self.gradients(self.net)
        chain, rng = self.profile.chain, random.Random(2)
        # Plans of whatever moves, and one in which all is away for as long as it can be.
        self.schedules = [random_moves(rng, chain, random_schedule(rng, chain)) for _ in range(2)]
        self.schedules += [
            Schedule.parse("0> 1> 2> 3> 4> 5> 6> 7> 8 9"),
            Schedule.parse("0> 1>3<4 2> (3-4)> 5> 6> 7> 8 9"),
        ]

    def gradients(self, forward: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
        self.net.zero_grad()
        torch.manual_seed(1)
        forward(self.batch).square().sum().backward()
        torch.cuda.synchronize()
        return [parameter.grad.clone() for parameter in self.net.parameters() if parameter.grad is not None]

    def keeps_bits(self, around: Callable[[], Any] = nullcontext) -> bool:
        """True if steps under all schedules do."""
        for schedule in self.schedules:
            memory = PinnedMemory(GPU)
            run = Executor(self.profile.stages, self.profile.chain, schedule, self.profile.states, memory=memory)
            for _ in range(2):
                with around():
                    seen = self.gradients(run)
                if not all(map(torch.equal, self.plain, seen)):
                    return False
                gc.collect()
                assert memory.used_bytes == 0
        return True


@contextmanager
def other_stream() -> Iterator[None]:
    """Compute on a stream that is not the default one, and let both wait for each other."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def nothing(*_: Any) -> None:
    """In the place of a wait."""


def used_without_waiting(copy: PinnedCopy) -> torch.UntypedStorage:
    storage, copy._target = copy._target, None
    assert storage is not None
    return storage


@contextmanager
def without_waits_of(name: str) -> Iterator[None]:
    """The stream of that name of a memory waits for nothing that computes."""
    made = PinnedMemory.__init__

    def without(self: PinnedMemory, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        stream = getattr(self, name)

        class Careless(type(stream)):  # type: ignore[misc]
            def wait_event(self, event: Any) -> None:
                pass

        stream.__class__ = Careless

    with patch.object(PinnedMemory, "__init__", without):
        yield


MUTANTS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "no wait before memory is given back": (lambda: patch.object(PinnedCopy, "wait_out", nothing), nullcontext),
    "no wait before use": (lambda: patch.object(PinnedCopy, "wait_back", used_without_waiting), nullcontext),
    "copies out do not wait": (lambda: without_waits_of("out"), nullcontext),
    "copies back do not wait": (lambda: without_waits_of("back"), nullcontext),
    "always the default stream": (
        lambda: patch.object(PinnedMemory, "compute_stream", lambda self: torch.cuda.default_stream(GPU)),
        other_stream,
    ),
}


def abandoned() -> bool:
    """True if memory that a copy was on its way to is not written to when somebody else has it."""
    memory = PinnedMemory(GPU)
    storage = torch.zeros(4096, device=GPU).untyped_storage()
    copy = memory.copy_out(storage)
    copy.wait_out()
    copy.begin_back()
    del copy
    other = torch.ones(4096, device=GPU)
    torch.cuda.synchronize()
    return bool((other == 1).all())


def main() -> None:
    """Run all of it."""
    task = Task()
    with patch.object(moving, "ref", noticed):
        found = {"as it is": task.keeps_bits(), "as it is, on another stream": task.keeps_bits(other_stream)}
        for name, (mutated, around) in MUTANTS.items():
            with mutated():
                found[name] = task.keeps_bits(around)
    found["abandoned"] = abandoned()
    with patch.object(PinnedCopy, "__del__", nothing):
        found["abandoned without a wait"] = abandoned()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
