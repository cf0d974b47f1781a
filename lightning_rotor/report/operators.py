"""What the operators of a stage are called in a drawing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

from torch import nn

from lightning_rotor.sequential import Stage
from lightning_rotor.tracing import GraphSlice

# They compute nothing. Shown only if a stage does nothing else.
_QUIET = frozenset(
    name
    for line in (
        "size dim numel getattr getitem _assert view reshape transpose permute unsqueeze squeeze expand expand_as contiguous",
        "view_as reshape_as t movedim swapaxes unflatten chunk split unbind detach to type_as is_floating_point tree_unflatten",
        "eq ne lt le gt ge floordiv mod",
    )
    for name in line.split()
)

_PLAIN = {name: name for name in _QUIET} | {f"i{name}": name for name in ("add", "sub", "mul")} | {"truediv": "div"}


def operator_labels(stage: Stage) -> tuple[str, ...]:
    """What a stage runs, in order and for people; an operator that comes several times in a row once.

    Args:
        stage: With modules of the user's, or slices of a graph that call them.
    """
    labels = [label for module in stage.modules for label in _of_module(module)]
    loud = [label for label in labels if label not in _QUIET] or labels
    counted = ((label, len(list(group))) for label, group in groupby(loud))
    return tuple(label if count == 1 else f"{label} (×{count})" for label, count in counted)


def _of_module(module: nn.Module) -> Iterable[str]:
    if isinstance(module, GraphSlice):
        return [label for operator in module.operators for label in _of_operator(operator)]
    if isinstance(module, nn.Sequential):
        return [label for member in module for label in _of_module(member)]
    return [_described(module)]


def _of_operator(operator: Any) -> Iterable[str]:
    if isinstance(operator, nn.Module):
        return _of_module(operator)
    name = operator if isinstance(operator, str) else getattr(operator, "__name__", str(operator))
    return [_PLAIN.get(name, name.strip("_"))]


def _described(module: nn.Module) -> str:
    for kind, describe in _DESCRIBED.items():
        if isinstance(module, kind):
            return describe(module)
    name = type(module).__name__
    return name.removesuffix("1d").removesuffix("2d").removesuffix("3d") if name.startswith("BatchNorm") else name


def _convolution(module: Any) -> str:
    size = "×".join(map(str, module.kernel_size))
    stride = f" /{module.stride[0]}" if module.stride[0] > 1 else ""
    if module.groups == module.in_channels > 1:
        channels = f"depthwise {module.out_channels}"
    else:
        groups = f", {module.groups} groups" if module.groups > 1 else ""
        channels = f"{module.in_channels}→{module.out_channels}{groups}"
    transposed = "ConvTranspose" if module.transposed else "Conv"
    return f"{transposed} {size} {channels}{stride}"


_DESCRIBED: dict[type[nn.Module], Callable[[Any], str]] = {
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _convolution),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _convolution),
    nn.Linear: lambda module: f"Linear {module.in_features}→{module.out_features}",
    nn.Embedding: lambda module: f"Embedding {module.num_embeddings}×{module.embedding_dim}",
    nn.MultiheadAttention: lambda module: f"MultiheadAttention {module.embed_dim}, {module.num_heads} heads",
}
