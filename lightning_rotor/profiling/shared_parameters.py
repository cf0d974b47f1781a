"""Parameters that several stages share: autograd sums their gradients before it hands them on.

Where no gradient exists yet, the sum becomes it, and each stage but the last to run its backward leaves nothing that
stays. Where one exists, the sum waits beside it until the last share is there. Counting each stage's share as one that
stays predicted up to twice the parameters for a network that a forward calls twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

from lightning_rotor.private.sharding import units_in
from lightning_rotor.private.values import bytes_of
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.units import in_blocks


def waiting_gradient_bytes(stages: Sequence[Stage], block_bytes: int) -> tuple[int, ...]:
    """For each stage, bytes of shared parameters' gradients that wait after its backward for an earlier stage's share.

    Autograd gives a parameter the sum of its gradients, once, and holds the first of them until the last is there::

        backward    stage 5 ───► 4 ───► 3 ───► 2 ───► 1          stages 1 and 5 share a weight
                    └──── its gradient waits ────────┘ then is added to the one that exists, and freed

    Where no gradient exists, the sum becomes it, so nothing extra waits: see :func:`added_gradient_bytes`.
    """
    readers: dict[nn.Parameter, list[int]] = {}
    for number, stage in enumerate(stages):
        for parameter in stage.learning():
            readers.setdefault(parameter, []).append(number)
    waiting = [0] * len(stages)
    for parameter, numbers in readers.items():
        size_bytes = in_blocks(bytes_of(parameter), block_bytes)
        # Not the first: its backward comes last, and brings the last share.
        for number in range(numbers[0] + 1, numbers[-1] + 1):
            waiting[number] += size_bytes
    return tuple(waiting)


def shared_later(stages: Sequence[Stage]) -> list[dict[int, bool]]:
    """For each stage, numbers in ``Stage.learning()`` of the parameters that later stages share.

    The value is True if exactly one later stage shares the parameter.
    """
    shared_by_stage = list[dict[int, bool]]()
    later_readers = Counter[nn.Parameter]()
    # Backwards come from the last stage to the first.
    for stage in reversed(stages):
        # FSDP gives each use of a unit gathered parameters of its own, which share nothing.
        learning = [] if units_in(stage.modules) else stage.learning()
        shared = {}
        for number, parameter in enumerate(learning):
            # The gradient of a single later reader is no sum yet, so the first addition takes a new tensor.
            if later_readers[parameter]:
                shared[number] = later_readers[parameter] == 1
        shared_by_stage.append(shared)
        later_readers.update(learning)
    return shared_by_stage[::-1]


def added_gradient_bytes(
    stages: Sequence[Stage],
    shared: Sequence[Mapping[int, bool]],
    gradient_sizes: Sequence[Sequence[int]],
    block_bytes: int,
) -> list[int]:
    """For each stage, bytes of its gradients that do not stay, as they are added to those that later stages left.

    Args:
        stages: The stages of a chain.
        shared: Result of :func:`shared_later` for them.
        gradient_sizes: For each stage, bytes of the gradient of each parameter that learns; empty if nothing learns.
        block_bytes: Sizes are multiples of it.
    """
    added = list[int]()
    left = set[nn.Parameter]()
    for number in reversed(range(len(stages))):
        added_here = 0
        left_here = set[nn.Parameter]()
        for parameter, size_bytes in zip(stages[number].learning(), gradient_sizes[number], strict=False):
            # A stage without shared parameters, such as one of FSDP units, adds to nothing.
            if shared[number] and parameter in left:
                added_here += size_bytes
            # A sum of sparse gradients is larger than each of them, so what is added to one counts as staying.
            if size_bytes == in_blocks(bytes_of(parameter), block_bytes):
                left_here.add(parameter)
        added.append(added_here)
        left |= left_here
    return added[::-1]
