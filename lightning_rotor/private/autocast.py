"""The state of autocast in this thread, which torch tells for one kind of device at a time.

All names but one are public. They stand here together so that no other file has a list of kinds of its own: a call
that is compared under one list and recorded under another would be taken for equal when it is not.

Nothing is decided here. A recomputation runs under the first pass's autocast by ``execution/settings``, and without
its cache of casts by ``execution/passes`` (``run_stage``). Regions of recorded code are noted by ``capture/ambient``
and set by ``capture/node_facts`` (``Region``). ``planned/signature`` has a plan for each state.
"""

from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch

from lightning_rotor.devices import AUTOCASTING

AutocastState: TypeAlias = tuple[tuple[bool, torch.dtype], ...]
"""For each kind of device in ``AUTOCASTING``: True if autocast is on, and the type that it casts to."""


def autocast_state() -> AutocastState:
    """The state of autocast now, in two microseconds."""
    # A list in the place of a generator, which takes longer: guards ask at every call.
    return tuple([(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in AUTOCASTING])


def set_autocast_state(state: AutocastState) -> None:
    """Set what differs from ``state``."""
    # Asked first, for mostly nothing differs.
    for kind, (is_enabled, dtype) in zip(AUTOCASTING, state, strict=True):
        if torch.is_autocast_enabled(kind) is not is_enabled:
            torch.set_autocast_enabled(kind, is_enabled)
        if torch.get_autocast_dtype(kind) != dtype:
            torch.set_autocast_dtype(kind, dtype)


autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""True if autocast is on for any kind of device, in torch 2.11 to 2.15.

In public one kind is asked at a time, which takes three times as long. Every stage asks when it has run.
"""


def autocast_dtypes(tensors: Iterable[torch.Tensor]) -> list[torch.dtype]:
    """Types that autocast casts to on the devices of these tensors, as far as it is on there."""
    dtypes = []
    for kind in sorted({tensor.device.type for tensor in tensors}):
        # Asking for a kind without autocast (meta) is an error.
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            dtypes.append(torch.get_autocast_dtype(kind))
    return dtypes
