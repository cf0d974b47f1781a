"""Sizes of the results of frequent operations, by rule and not by running them.

Questions of a recording about sizes are asked again for each new size of input, on tensors of the meta device. There
torch takes most operations apart in Python: 0.2 ms for an addition and 1.3 ms for attention, where an empty tensor
takes two microseconds. A transformer of four layers would wait 10 ms for each new length.

A rule's result has the type, sizes and strides of what torch makes on the meta device. Where that is not certain there
is no rule, and the operation runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import functional

from lightning_rotor.private.autocast import autocast_state


def by_rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """A tensor of the meta device with the sizes of an operation's result; None if there is no rule for that."""
    rule = _RULES.get(func)
    if rule is None or not args:
        return None
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        # A subclass may have an operation of its own behind the name.
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            return None
    # Autocast would choose another type.
    if any(enabled for enabled, _ in autocast_state()):
        return None
    return rule(*args, **kwargs)


def _empty(shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _same_sizes(tensor: Any, *rest: Any, **options: Any) -> torch.Tensor | None:
    """Entry by entry, with the strides of the argument."""
    # Of integers some make floating-point numbers. Options may name a type, or write to the argument.
    if not _is_floating(tensor) or options.get("inplace") or "dtype" in options or "out" in options:
        return None
    return torch.empty_like(tensor, device="meta")


def _layer_norm(tensor: Any, *_: Any, **__: Any) -> torch.Tensor | None:
    """Sizes and type of the argument; contiguous, whatever its strides are."""
    return _empty(tensor.shape, tensor.dtype) if _is_floating(tensor) else None


def _linear(tensor: Any, weight: Any, bias: Any = None) -> torch.Tensor | None:
    if not _is_floating(tensor) or weight.dim() != 2 or tensor.dim() < 2:
        return None
    # Of two types, torch chooses the one of the result by rules that are not repeated here.
    if weight.dtype != tensor.dtype or (bias is not None and bias.dtype != tensor.dtype):
        return None
    # Sizes that do not go together are an error, which torch's own operation raises.
    if tensor.shape[-1] != weight.shape[1]:
        return None
    return _empty((*tensor.shape[:-1], weight.shape[0]), tensor.dtype)


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, *rest: Any, **options: Any
) -> torch.Tensor | None:
    leading, length, width = query.shape[:-2], query.shape[-2], query.shape[-1]
    if query.dim() < 3 or not query.dtype == key.dtype == value.dtype or not _is_floating(query):
        return None
    # Otherwise heads are shared, or sizes do not go together.
    if key.shape != (*leading, value.shape[-2], width) or value.shape[:-2] != leading:
        return None
    if attn_mask is not None and not _broadcasts_to(attn_mask.shape, (*leading, length, key.shape[-2])):
        return None
    return _empty((*leading, length, value.shape[-1]), query.dtype)


def _broadcasts_to(shape: torch.Size, wanted: tuple[int, ...]) -> bool:
    if len(shape) > len(wanted):
        return False
    return all(size in (1, other) for size, other in zip(reversed(shape), reversed(wanted), strict=False))


def _embedding(ids: Any, weight: Any, *_: Any, **__: Any) -> torch.Tensor | None:
    # The operation below torch's function takes them the other way round.
    if weight.dim() != 2 or ids.dtype not in (torch.int32, torch.int64):
        return None
    return _empty((*ids.shape, weight.shape[1]), weight.dtype)


def _arithmetic(left: Any, right: Any, **options: Any) -> torch.Tensor | None:
    return None if options else _broadcast((left, right), torch.result_type(left, right))


def _division(left: Any, right: Any, **options: Any) -> torch.Tensor | None:
    # Of integers it makes floating-point numbers.
    dtype = torch.result_type(left, right)
    return None if options or not dtype.is_floating_point else _broadcast((left, right), dtype)


def _comparison(left: Any, right: Any, **options: Any) -> torch.Tensor | None:
    if options or not all(isinstance(value, (torch.Tensor, bool, int, float)) for value in (left, right)):
        return None
    return _broadcast((left, right), torch.bool)


def _where(condition: Any, left: Any = None, right: Any = None, **options: Any) -> torch.Tensor | None:
    if options or left is None or right is None or condition.dtype is not torch.bool:
        return None
    return _broadcast((condition, left, right), torch.result_type(left, right))


def _broadcast(values: tuple[Any, ...], dtype: torch.dtype) -> torch.Tensor | None:
    """Of contiguous tensors, and numbers: contiguous, too."""
    shapes = []
    for value in values:
        if isinstance(value, torch.Tensor):
            if not value.is_contiguous():
                return None
            shapes.append(value.shape)
        elif not isinstance(value, (bool, int, float)):
            return None
    try:
        return _empty(torch.broadcast_shapes(*shapes), dtype)
    except RuntimeError:
        # Sizes that do not go together.
        return None


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _rules() -> dict[Any, Callable[..., torch.Tensor | None]]:
    """Rules by function: of :mod:`torch`, of its tensors, and of its modules."""
    by_names: dict[Callable[..., torch.Tensor | None], str] = {
        _same_sizes: "abs cos dropout exp gelu log neg relu rsqrt sigmoid silu sin sqrt tanh",
        _layer_norm: "layer_norm rms_norm",
        _linear: "linear",
        _attention: "scaled_dot_product_attention",
        _embedding: "embedding",
        _arithmetic: "add maximum minimum mul sub __add__ __radd__ __mul__ __rmul__ __sub__",
        _division: "div true_divide __truediv__",
        _comparison: "eq ge gt le lt ne __eq__ __ge__ __gt__ __le__ __lt__ __ne__",
        _where: "where",
    }
    rules: dict[Any, Callable[..., torch.Tensor | None]] = {}
    for rule, names in by_names.items():
        for name in names.split():
            # ``torch.embedding`` takes its arguments the other way round, ``Tensor.where`` begins with a choice.
            holders = (functional,) if rule is _embedding else (functional, torch, torch.Tensor)
            if rule is _where:
                holders = (torch,)
            for holder in holders:
                func = getattr(holder, name, None)
                if func is not None:
                    rules[func] = rule
    return rules


_RULES = _rules()
