"""Random generators that a module's forward does not draw from, so that measuring it must not set them back.

Another thread may draw from them meanwhile, such as a loader that prefetches. Setting such a generator back would
repeat that thread's draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_rotor.execution.isolated import draws_seen, kept_attributes, lent_buffers
from lightning_rotor.execution.passes import dropping_saved, repeating
from lightning_rotor.private.values import tensors_in
from lightning_rotor.profiling.stage_input import Boundary
from lightning_rotor.stages.draws import drawn_since
from lightning_rotor.stages.generators import GeneratorStates
from lightning_rotor.stages.other_threads import others_may_draw
from lightning_rotor.stages.sequential import Stage


def undrawn(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> frozenset[str]:
    """The generators that a module's forward does not draw from, if another thread may: it runs once to tell.

    Else none, as nobody minds if they are set back.
    """
    if not others_may_draw():
        return frozenset()
    boundary = Boundary.of((tuple(args), dict(kwargs)))
    device = tensors_in((args, kwargs))[0].device
    whole = Stage(type(module).__name__, (module,))

    def run() -> None:
        with (
            kept_attributes(whole),
            lent_buffers(whole),
            torch.enable_grad(),
            repeating(),
            # Nothing goes back here, so nothing that a backward would need is kept.
            dropping_saved(),
        ):
            # Copies, for the forward may change its input.
            fresh_args, fresh_kwargs = boundary.fresh()
            type(module).forward(module, *fresh_args, **fresh_kwargs)

    before = GeneratorStates(device)
    try:
        # What the module is seen to ask for is its own, whatever other threads do meanwhile.
        with draws_seen(whole) as certain:
            run()
    except Exception:
        # What is wrong is said by who runs it next.
        return frozenset()
    drawn = drawn_since(before, run, certain=certain)
    # Only what this run has drawn: setting back the others would repeat another thread's draws.
    before.restore(drawn)
    return before.kinds - drawn
