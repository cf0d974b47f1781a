"""Answers to questions for values that do not exist, so that code on fake tensors goes on.

A step asks for values all the time (an index, a mask, lengths), and torch's fake tensors raise. Most steps take the
same way whatever the answer is, so one that is consistent with itself does: all masks are true, and all entries differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lightning_rotor.private import torch_names as private
from lightning_rotor.private.values import is_fake

_aten = torch.ops.aten


class AssumedValues(private.TorchDispatchMode):
    """Answers, and counts, questions for values that do not exist, so that code goes on.

    Masks are true, numbers 1 (floats ``number``), all entries differ from each other, sequences have their full length,
    no box overlaps another, and an entry is repeated once.
    """

    def __init__(self, number: float = 1.0) -> None:
        super().__init__()
        self.assumed_values = 0
        self._number = number

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except (private.DataDependentOutputException, private.DynamicOutputShapeException):
            # Only where torch has no answer: what follows from known values stays what it is.
            self.assumed_values += 1
            return self.answer(func, args, kwargs)

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result under the assumptions; raises DynamicOutputShapeException if none of them answers."""
        packet = private.packet_of(func)
        if func is _aten._local_scalar_dense.default:
            return self._scalar(args[0].dtype)
        if func in (_aten.equal.default, _aten.allclose.default):
            return True
        # In the real run the result has at most as many rows, so the costs are a bound.
        if packet in (_aten.index, _aten.index_put, _aten.index_put_):
            return func(args[0], _without_masks(args[1]), *args[2:], **kwargs)
        if packet in (_aten._unique2, _aten.unique_consecutive, _aten.unique_dim, _aten._unique):
            return _unique(packet, *args, **kwargs)
        answer = _ANSWERS.get(func) or _ANSWERS.get(packet)
        if answer is None and packet.__name__ == "nms":
            # torchvision's, which need not be installed.
            answer = _places_of_all_boxes
        if answer is None:
            raise private.DynamicOutputShapeException(func)
        return answer(*args, **kwargs)

    def _scalar(self, dtype: torch.dtype) -> complex:
        if dtype.is_complex:
            return complex(self._number)
        if dtype.is_floating_point:
            return self._number
        return True if dtype is torch.bool else 1


def _nonzero(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)


def _masked_select(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty(torch.broadcast_shapes(tensor.shape, mask.shape).numel())


def _repeat_interleave(repeats: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return repeats.new_empty(repeats.numel(), dtype=torch.int64)


def _places_of_all_boxes(boxes: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    # None overlaps another, so none is suppressed.
    return boxes.new_empty(len(boxes), dtype=torch.int64)


def _bincount(
    tensor: torch.Tensor,
    weights: torch.Tensor | None = None,
    minlength: int = 0,
) -> torch.Tensor:
    # Entries are 0 and 1 at least, as those of masks and labels.
    return tensor.new_empty(max(2, minlength))


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses, and what the backward reads: a number for each step, and each label with blanks around it."""
    steps, size = log_probs.shape[:2]
    longest = targets.shape[1] if targets.dim() > 1 else targets.numel()
    return log_probs.new_empty(size), log_probs.new_empty(size, steps, 2 * longest + 1)


def _unique(
    packet: Any,
    tensor: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, ...]:
    """Results of ``unique`` and its kin for entries that all differ: entries, places in them, and counts."""
    if packet is _aten.unique_dim:
        dim = args[0] if args else kwargs["dim"]
        indices = tensor.new_empty(tensor.shape[dim], dtype=torch.int64)
        return torch.empty_like(tensor), indices, torch.empty_like(indices)
    values = tensor.new_empty(tensor.numel())
    places = tensor.new_empty(tensor.shape, dtype=torch.int64)
    if packet is _aten._unique:
        return values, places
    return values, places, tensor.new_empty(tensor.numel(), dtype=torch.int64)


def _pack_padded_sequence(
    tensor: torch.Tensor,
    lengths: torch.Tensor,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries of padded sequences in a row, and how many sequences have one at each time."""
    size, steps = tensor.shape[:2] if batch_first else tensor.shape[1::-1]
    known_lengths = private.value_of(lengths)
    with private.no_dispatch():
        all_lengths = [steps] * size if known_lengths is None else known_lengths.tolist()
        sizes = torch.tensor([sum(length > step for length in all_lengths) for step in range(max(all_lengths))])
    entries = tensor.new_empty(sum(all_lengths), *tensor.shape[2:])
    return entries, private.fake_with_value(private.mode_of(tensor), sizes)


_ANSWERS: dict[Any, Callable[..., Any]] = {
    _aten.nonzero.default: _nonzero,
    _aten.masked_select.default: _masked_select,
    _aten.repeat_interleave: _repeat_interleave,
    _aten._pack_padded_sequence: _pack_padded_sequence,
    _aten.bincount: _bincount,
    _aten._ctc_loss: _ctc_loss,
}


def _without_masks(indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Indices with as many positions in the place of a mask as it has elements."""
    expanded: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            # A mask indexes as many dimensions as it has.
            for _ in range(index.dim()):
                expanded.append(index.new_empty(index.numel(), dtype=torch.int64))
        else:
            expanded.append(index)
    return expanded


class AssumedArrays(TorchFunctionMode):
    """Answers what no dispatcher sees: NumPy gets ones for values that do not exist; packed sequences run as one."""

    def __init__(self, counts: AssumedValues) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if func in (torch.Tensor.numpy, torch.Tensor.__array__) and is_fake(args[0]):
            return self._array(args[0])
        if func is torch.Tensor.__deepcopy__:
            return _copied(*args)
        # Of padded sequences the third argument is the list of weights, of packed ones it is the state.
        if func in private.RECURRENT and isinstance(args[2], (torch.Tensor, tuple)) and is_fake(args[0]):
            return _run_packed(func, *args)
        if func is private.pad_sequences and is_fake(args[0]):
            return _padded(*args)
        if func in (torch.istft, torch.Tensor.istft) and is_fake(args[0]):
            return private.istft_in_parts(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _array(self, tensor: torch.Tensor) -> Any:
        value = private.value_of(tensor)
        with private.no_dispatch():
            if value is None:
                self._counts.assumed_values += 1
                # NumPy needs memory: as everywhere, numbers are 1 and masks are true.
                value = torch.ones(tensor.shape, dtype=tensor.dtype)
            return value.numpy()


def _copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """A deep copy. Torch's own (2.14) fails on fake tensors, and leaves one behind that crashes the process."""
    copied: torch.Tensor | None = memo.get(id(tensor))
    if copied is None:
        copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        memo[id(tensor)] = copied
    return copied


def _run_packed(
    func: Any,
    data: torch.Tensor,
    sizes: torch.Tensor,
    state: Any,
    *settings: Any,
) -> Any:
    """Results of a recurrent layer on packed sequences, which take the compute of one that is as long as all."""
    is_lstm = isinstance(state, tuple)
    states = state if is_lstm else (state,)
    # One sequence starts from one state: the second dimension is the batch.
    first_states = tuple(state_of_all[:, :1].contiguous() for state_of_all in states)
    batch_first = False
    output, *last_states = func(data.unsqueeze(1), first_states if is_lstm else first_states[0], *settings, batch_first)
    expanded = [last.expand_as(given) for last, given in zip(last_states, states, strict=True)]
    return output.squeeze(1), *expanded


def _padded(
    data: torch.Tensor,
    sizes: torch.Tensor,
    batch_first: bool,
    value: float,
    total: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed sequences side by side, and their lengths."""
    known_sizes = private.value_of(sizes)
    with private.no_dispatch():
        sizes_by_step = [1] * len(sizes) if known_sizes is None else known_sizes.tolist()
    batch = max(sizes_by_step)
    steps = max(total, len(sizes_by_step))
    padded = data.new_full((batch * steps, *data.shape[1:]), value)
    # The entries get there by an operation that autograd follows.
    places = data.new_empty(len(data), dtype=torch.int64)
    padded = padded.index_add(0, places, data).unflatten(0, (batch, steps))
    with private.no_dispatch():
        lengths = torch.tensor([sum(size > place for size in sizes_by_step) for place in range(batch)])
    if not batch_first:
        padded = padded.transpose(0, 1)
    return padded, private.fake_with_value(private.mode_of(data), lengths)
