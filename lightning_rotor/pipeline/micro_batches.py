"""Micro-batches: a batch cut along dimension 0, and outputs of micro-batches put together again."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import torch

from lightning_rotor.errors import PipelineError
from lightning_rotor.pipeline.partition.cuts import even_balance
from lightning_rotor.private.values import tensors_in, tree_flatten, tree_unflatten

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call."""


def rows_in(batch: Any) -> int:
    """Number of samples in a batch: the size of dimension 0 of its tensors."""
    # A scalar belongs to no sample: it goes into each micro-batch.
    sizes = list(dict.fromkeys(tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()))
    if len(sizes) == 1 and sizes[0] > 0:
        return sizes[0]
    if sizes:
        holds = f"tensors of {', '.join(map(str, sizes))} rows"
    else:
        holds = f"no tensor with a dimension ({type(batch).__name__})"
    raise PipelineError(
        f"a batch is split along dimension 0, and this one holds {holds}: expected tensors that all have one row "
        "for each sample, and a sample at least. Give what belongs to no sample as an attribute of the model, and "
        "leave empty batches out"
    )


def sizes_of(rows: int, micro_batches: int) -> tuple[int, ...]:
    """Rows of each micro-batch: as equal as can be, larger ones first, and none without a row.

    Example:
        >>> sizes_of(10, 4), sizes_of(3, 4)
        ((3, 3, 2, 2), (1, 1, 1))
    """
    return tuple(even_balance(rows, micro_batches))


def split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Micro-batches of a batch; values without rows go into each."""
    leaves, spec = tree_flatten(batch)
    ends = list(accumulate(sizes))
    parts = []
    for end, size in zip(ends, sizes, strict=True):
        part = []
        # What has no row for each sample, such as a table or a number, is the whole batch's.
        for leaf in leaves:
            part.append(leaf[end - size : end] if _has_rows(leaf, ends[-1]) else leaf)
        parts.append(tree_unflatten(part, spec))
    return parts


def _has_rows(leaf: Any, rows: int) -> bool:
    """True for a tensor with a row for each sample."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == rows


def largest_part(batch: Any, micro_batches: int) -> Any:
    """The first micro-batch, of which none is larger."""
    return split(batch, sizes_of(rows_in(batch), micro_batches))[0]


def join(parts: Sequence[Any], sizes: Sequence[int] = ()) -> Any:
    """Output of the batch from those of micro-batches; with ``sizes``, scalars become their mean by rows."""
    if len(parts) == 1:
        return parts[0]
    # Micro-batches of a call nest alike: layouts refuse others before.
    leaves_of_parts = []
    for part in parts:
        leaves, spec = tree_flatten(part)
        leaves_of_parts.append(leaves)
    columns = zip(*leaves_of_parts, strict=True)
    joined = [_joined(column, sizes) for column in columns]
    return tree_unflatten(joined, spec)


def _joined(column: Sequence[Any], sizes: Sequence[int]) -> Any:
    """One leaf of the batch's output, from those of micro-batches."""
    leaf = column[0]
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.dim():
        return torch.cat(list(column))
    if sizes and leaf.is_floating_point():
        return mean_by_rows(column, sizes)
    # A whole number is a count or a size: its mean would be none.
    return leaf


def mean_by_rows(numbers: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """Mean of a number of each micro-batch; of one, its value to the bit."""
    if len(numbers) == 1:
        return numbers[0]
    column = torch.stack(list(numbers))
    # Of half precision, the sum would lose what the numbers have.
    exact = column.to(torch.promote_types(column.dtype, torch.float32))
    weights = exact.new_tensor(sizes)
    return ((exact * weights).sum() / weights.sum()).to(column.dtype)
