"""Modules that wait for other processes in their forward."""

from __future__ import annotations

from torch import nn

_NAMES = frozenset(
    (
        "all_gather",
        "all_gather_into_tensor",
        "all_reduce",
        "all_to_all",
        "all_to_all_single",
        "broadcast",
        "reduce_scatter_tensor",
    )
)


def communicates(module: nn.Module) -> bool:
    """Whether a module's forward waits for other processes, as far as its layers, its parameters and the names in its code tell."""
    return any(map(_is_collective, module.modules())) or any(
        hasattr(parameter, "device_mesh") for parameter in module.parameters()
    )


def _is_collective(module: nn.Module) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    return isinstance(module, nn.SyncBatchNorm) or (code is not None and not _NAMES.isdisjoint(code.co_names))
