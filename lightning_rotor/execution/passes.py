"""A stage runs first, and again in a recomputation, which neither sees nor repeats what the first pass changed.

A second forward would count a batch twice in running statistics, draw other random numbers, and start from other values
than the first pass did. The rules, to which comments in this folder refer by number, each with an example:

1.  **The inputs are the first pass's**, and unchanged. Else the recomputation is refused, by the input's name::

        y = net(x); x.zero_(); y.sum().backward()         # ExecutionError: input 'x' has changed since

2.  **Parameters, and buffers that the first pass does not update, are its own tensors**, unchanged, also under
    ``functional_call``, and with their ``requires_grad``. Those of FSDP units come and go with the units' hooks::

        loss = net(x).sum(); optimizer.step(); loss.backward()            # ExecutionError: parameter '0.weight'

3.  **torch's normalization in training never reads its running statistics.** A replay writes to scratch buffers::

        nn.BatchNorm2d(8)                                 # num_batches_tracked is 1 after a step, not 2

4.  **Other buffers that are updated are remembered.** A replay works on copies of what the first pass found. That holds
    for modules that were seen to update theirs, for small buffers of user code, and for 3. where code around may read::

        self.average.mul_(0.9).add_(x.mean()); return x - self.average    # the average from before, in both

5.  **Large buffers of user code are watched.** The first update in a segment is refused, for the value is gone::

        self.memory_bank[i] = x                           # 1 GiB, never seen to change while it was measured

6.  **Attributes of user code, and what its hooks can reach, are set to what the first pass saw**, and back afterwards,
    with all that lists, dicts and objects hold (``stages.snapshot``)::

        self.calls += 1; return x * self.calls            # calls is 1 in both passes, and 1 after the step

7.  **Generators that the first pass drew from are set back**, and no others, which threads may be using::

        F.dropout(x)                                      # the same mask; a loader's shuffling goes on

8.  **Hooks that only look are not called again** (``observers``): what they do outside of Python cannot be undone::

        layer.register_forward_hook(lambda module, args, output: file.write(str(output.mean())))

9.  **Settings are the first pass's**: torch's (default dtype, autocast, allowed kernels) and those of its layers (a
    mode, a dropout's ``p``). Hooks that came later are not called::

        with torch.autocast("cpu"): y = net(x)
        y.sum().backward()                                # runs again under autocast, too

10. **A replay saves the same tensors in the same order.** It stops at the last one; other types or shapes are refused::

        if time.time() % 2 < 1: x = x.exp()               # ExecutionError: saved other tensors than before

11. **Everything is put back whatever happens**, an interrupt (Ctrl-C) between any two lines included.

Here is what all passes have in common; ``first_pass`` keeps the rules.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_rotor.errors import InverseError
from lightning_rotor.private.autocast import autocast_enabled
from lightning_rotor.stages.sequential import Stage


class _Flags(threading.local):
    """Flags of this thread: backward passes of CUDA graphs run in other threads than the forward.

    Attributes:
        recomputing: How many contexts of :func:`repeating` there are.
        checkpointing: How many contexts of :func:`checkpointing` there are.
    """

    recomputing = 0
    checkpointing = 0


_flags = _Flags()


def is_recomputing() -> bool:
    """True if the current forward repeats one that has already run, so that nothing should come of it."""
    return _flags.recomputing > 0


def is_checkpointing() -> bool:
    """True if the current forward drops its saved tensors because it will be recomputed."""
    return _flags.checkpointing > 0


@contextmanager
def repeating(repeats: bool = True) -> Iterator[None]:
    """Context in which :func:`is_recomputing` gives ``repeats``."""
    before = _flags.recomputing
    try:
        try:
            _flags.recomputing = before + 1 if repeats else 0
            yield
        finally:
            _flags.recomputing = before
    finally:
        # Rule 11: an interrupt may have come before the line above.
        _flags.recomputing = before


@contextmanager
def checkpointing() -> Iterator[None]:
    """Context in which :func:`is_checkpointing` is True."""
    before = _flags.checkpointing
    try:
        try:
            _flags.checkpointing = before + 1
            yield
        finally:
            _flags.checkpointing = before
    finally:
        # Rule 11.
        _flags.checkpointing = before


def run_stage(stage: Stage, value: Any, option: int = 0) -> Any:
    """Run a stage under an option: plainly under the first one, ``keep``, and else its variant.

    Autocast caches every weight that it casts until its context ends. That would pin a second copy of all weights, and
    let a recomputation save other tensors than the first pass, so the cache lives for one stage. Within a stage a
    weight is still cast once. Raises InverseError if a coupling cannot split its input.
    """
    try:
        return stage.variants[option - 1](value) if option else stage(value)
    except InverseError as error:
        # Modules know their type, not where they are.
        raise error.located(stage.name) from error
    except (TypeError, AttributeError, KeyError) as error:
        # In a first pass it is an error of the model, as in plain training, and no business of ours.
        if is_recomputing():
            error.args = (
                f"{error}. Stage {stage.name!r} ran again, or alone: if a layer before hands it something by a global "
                "variable or an attribute, declare that with @lightning_rotor.skippable",
            )
        raise
    finally:
        forget_casts()


def forget_casts() -> None:
    """Empty autocast's cache if it is in use."""
    # The call alone takes microseconds, at every stage of every step.
    if autocast_enabled() and torch.is_autocast_cache_enabled():
        torch.clear_autocast_cache()


def _nothing(_: Any) -> Any:
    return None


def dropping_saved() -> saved_tensors_hooks:
    """Context of a forward that has no backward: nothing is kept of what autograd saves."""
    return saved_tensors_hooks(_nothing, _nothing)
