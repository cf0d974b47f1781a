"""Micro-batches: a batch cut along dimension 0, and results put together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_rotor.pipeline.schedule import PipelineError
from lightning_rotor.private.values import tensors_in, tree_flatten, tree_map, tree_unflatten


def rows_in(batch: Any) -> int:
    """How many samples a batch holds: the size of dimension 0 of its tensors.

    Raises:
        PipelineError: It holds no tensor with a dimension, or its tensors differ.
    """
    sizes = list(dict.fromkeys(tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()))
    if len(sizes) != 1:
        found = (
            f"tensors of {', '.join(map(str, sizes))} rows"
            if sizes
            else f"no tensor with a dimension ({type(batch).__name__})"
        )
        raise PipelineError(
            f"a batch is split along dimension 0, and this one holds {found}: expected tensors that all have one row for each sample. "
            "Give what belongs to no sample as an attribute of the model"
        )
    return sizes[0]


def sizes_of(rows: int, micro_batches: int) -> tuple[int, ...]:
    """Rows of each micro-batch: as equal as can be, larger ones first; with fewer rows than micro-batches there is one for each row.

    Example:
        >>> sizes_of(10, 4), sizes_of(3, 4)
        ((3, 3, 2, 2), (1, 1, 1))
    """
    count = max(min(rows, micro_batches), 1)
    return tuple(rows // count + (place < rows % count) for place in range(count))


def split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """A batch in micro-batches. Lists as long as the batch are cut as well; whatever has no rows goes into each."""
    rows = sum(sizes)
    starts = [sum(sizes[:place]) for place in range(len(sizes))]

    def part(value: Any, start: int, size: int) -> Any:
        return (
            value[start : start + size]
            if isinstance(value, torch.Tensor) and value.dim() and len(value) == rows
            else value
        )

    return [tree_map(lambda value: part(value, start, size), batch) for start, size in zip(starts, sizes, strict=True)]  # noqa: B023


def join(parts: Sequence[Any]) -> Any:
    """Outputs of micro-batches as that of the batch: tensors one behind the other, of everything else the first."""
    if len(parts) == 1:
        return parts[0]
    leaves, spec = zip(*(tree_flatten(part) for part in parts), strict=True)
    together = [
        torch.cat(column) if isinstance(column[0], torch.Tensor) and column[0].dim() else column[0]
        for column in zip(*leaves, strict=True)
    ]
    return tree_unflatten(together, spec[0])
