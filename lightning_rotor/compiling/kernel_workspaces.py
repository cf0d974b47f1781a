"""Memory that kernels take while they run, beyond what they return: no graph shows it.

oneDNN copies what a convolution reads into blocks of 16 channels, for one:
of four channels that is four times as much.
Each kind of operation runs once, on zeros. The CPU's allocator alone tells of single blocks. On other devices these
bytes count as none, and show once the finished graphs are measured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lightning_rotor.compiling.graph_costs import computes_much, is_pointwise, is_view, node_bytes
from lightning_rotor.private.operators import OpOverload
from lightning_rotor.private.partitioning import is_mutable, outside_of_fakes
from lightning_rotor.private.profiler import AllocationLog, blocks_in, is_profiling


class Workspaces:
    """Bytes of kernels by operation, shapes and arguments.

    Args:
        fused: The compiler writes kernels of its own, which take nothing besides, for all but large operations.
    """

    def __init__(self, *, fused: bool) -> None:
        self._fused = fused
        self._known: dict[Any, int] = {}

    def of(self, node: fx.Node) -> int:
        """Bytes that the kernel of a node takes besides the memory of the node itself; other results count."""
        target = node.target
        if not isinstance(target, OpOverload) or is_view(node) or is_pointwise(node) or is_mutable(target):
            return 0
        if torch.Tag.nondeterministic_seeded in target.tags:
            return 0  # it would draw
        if self._fused and not computes_much(node):
            return 0
        key = target, repr(fx.node.map_aggregate((node.args, node.kwargs), _described))
        if key not in self._known:
            self._known[key] = max(0, _peak_bytes(node, channels_last=self._fused) - node_bytes(node))
        return self._known[key]


def _described(argument: Any) -> Any:
    """Type and layout of an argument that is a node, else the argument."""
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else argument
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, tuple(value.shape), value.stride()
    return value


def _peak_bytes(node: fx.Node, *, channels_last: bool) -> int:
    """Highest level of the allocator while an operation runs on zeros; 0 where that cannot be told.

    With ``channels_last``, images lie as Inductor lets them lie for convolutions on the CPU.
    """
    target: Any = node.target

    def zeros(argument: Any) -> Any:
        value = argument.meta.get("val") if isinstance(argument, fx.Node) else argument
        if not isinstance(value, torch.Tensor):
            return value
        if value.device.type != "cpu":
            raise NotImplementedError
        zero = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()
        if channels_last and value.dim() == 4 and "convolution" in str(target):
            return zero.contiguous(memory_format=torch.channels_last)
        return zero

    if is_profiling():
        return 0
    try:
        with outside_of_fakes(), torch.no_grad():
            args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), zeros)
            # What a kernel keeps for its next runs is not its workspace.
            target(*args, **kwargs)
            with AllocationLog() as log:
                results = target(*args, **kwargs)
            del results
    except Exception:  # of an operation that refuses zeros, or has no kernel here
        return 0
    level = peak = 0
    for _, block in blocks_in(log):
        level += block.alloc_size
        peak = max(peak, level)
    return peak
