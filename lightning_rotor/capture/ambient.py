"""Settings of torch around a call, which change what an operation computes or saves."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lightning_rotor.devices import AUTOCASTING
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.autocast import AutocastState, autocast_state


class Ambient(NamedTuple):
    """Settings at one moment that code can switch for a few lines, comparable.

    Attributes:
        gradients: Gradients are recorded.
        kernels: Settings that a graph cannot set again: inference mode, the default type, determinism, anomaly mode,
            and which kernels attention may use.
        autocast: See :func:`~lightning_rotor.private.autocast.autocast_state`.
        hooks: The innermost hooks on saved tensors, by ``id``; None without any.
    """

    gradients: bool
    kernels: tuple[Any, ...]
    autocast: AutocastState
    hooks: tuple[int, ...] | None

    @property
    def without_hooks(self) -> tuple[Any, ...]:
        """The settings that count for a recording. Stages run under whatever hooks on saved tensors are set."""
        return self.gradients, self.kernels, self.autocast

    def autocast_changes(self, base: Ambient) -> tuple[tuple[str, bool, torch.dtype], ...]:
        """Kinds of devices whose autocast is another than in ``base``, with what it is."""
        changes = []
        for kind, now, then in zip(AUTOCASTING, self.autocast, base.autocast, strict=True):
            if now != then:
                changes.append((kind, *now))
        return tuple(changes)


def ambient() -> Ambient:
    """The settings of this moment. A guard asks for them at every training call."""
    # Other settings, such as the precision of products, do not change which operations run: see execution/settings.
    hooks = private.hooks_for_saved_tensors()
    kernels = (
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_anomaly_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
    )
    hook_ids = None if hooks is None else tuple(map(id, hooks))
    # Not Ambient(...), which Python writes in a file of no name: while a module is recorded, the surroundings would
    # take that for code of the user's.
    return tuple.__new__(Ambient, (torch.is_grad_enabled(), kernels, autocast_state(), hook_ids))
