"""Running a user's module for real and leaving everything as it was: generators, buffers, attributes, autocast's cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_rotor.generators import HostGenerators
from lightning_rotor.options import autocast_enabled
from lightning_rotor.recomputation import repeating
from lightning_rotor.sequential import Stage
from lightning_rotor.snapshot import Snapshot


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Set generators back at the end, compute with gradients, and tell users' code that this is no step of theirs.

    Saved tensors are kept plainly, whatever hooks are set around the call (a checkpoint of the user's, say).
    """
    devices = [device] if device.type == "cuda" else []
    host = HostGenerators()
    # Detached: a node that saves its own output would hold the tensor that holds the node, and nobody would ever free the two.
    kept_plainly = saved_tensors_hooks(torch.Tensor.detach, _same)
    with torch.random.fork_rng(devices=devices, device_type="cuda"), torch.enable_grad(), repeating(), kept_plainly:
        try:
            yield
        finally:
            host.restore()
            if autocast_enabled():
                torch.clear_autocast_cache()


@contextmanager
def kept_attributes(stage: Stage) -> Iterator[Snapshot]:
    """Set back at the end all that the stage's modules and hooks can reach."""
    before = Snapshot(module for _, module in stage.submodules())
    try:
        yield before
    finally:
        before.restore()


@contextmanager
def lent_buffers(stage: Stage) -> Iterator[list[tuple[torch.nn.Module, str, torch.Tensor]]]:
    """Give the stage copies of its buffers for the time being; yields the slots with the originals, which nothing changes."""
    slots = {
        (id(module), name): (module, name, buffer)
        for _, module in stage.submodules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    }
    originals = list(slots.values())
    copies: dict[int, torch.Tensor] = {}
    for module, name, original in originals:
        module._buffers[name] = copies.setdefault(id(original), original.detach().clone())
    try:
        yield originals
    finally:
        for module, name, original in originals:
            module._buffers[name] = original


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
