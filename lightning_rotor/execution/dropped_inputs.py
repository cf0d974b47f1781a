"""Boundaries that are dropped in the forward, and what those who saved them refer to until they are rebuilt.

Nothing is freed under anybody's feet: references are dropped, storages never shrink. Who may hold the input of an inverted stage is known::

    item before ──x──► stage ──y──► item behind

    the running forward         lets go of ``x`` when the stage is done, as of any boundary
    a stage before that saved   runs under hooks (:class:`SavedOutput`). Its saved tensors that show ``x`` become references to
    ``x``, its own output       the boundary (:class:`Boundary`), which is empty until it is rebuilt. Not ReLU's: a rebuilt zero
                                may be no zero, see :attr:`lightning_rotor.chain.Option.needs_exact_output`
    an inverted stage before    refers to ``x`` in the same way (:class:`Output`): it needs it to rebuild its own input

A boundary is one tensor, or several in a tuple, list or dict: here they are a list, in the order of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_rotor.errors import ExecutionError
from lightning_rotor.execution.recomputation import is_checkpointing
from lightning_rotor.private.torch_names import hooks_for_saved_tensors, identity_of


class Boundary:
    """Tensors that were dropped, for those who refer to them.

    Args:
        name: Of the stage that rebuilds them.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tensors: dict[int, torch.Tensor] = {}
        self._referred_to: set[int] = set()

    def refer(self, *numbers: int) -> None:
        """Somebody will ask for the tensors with these numbers."""
        self._referred_to.update(numbers)

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """They are rebuilt; those that nobody will ask for are left alone."""
        self._tensors = {number: tensors[number] for number in self._referred_to}

    def get(self, number: int) -> torch.Tensor:
        """One of the tensors.

        Raises:
            ExecutionError: The backward has not rebuilt them.
        """
        if number not in self._tensors:
            raise ExecutionError(
                f"a backward asks for the input of {self._name!r}, which was dropped and is not rebuilt: expected a backward that "
                "passes through all of that stage. Do not invert it, or differentiate with respect to what comes before it as well"
            )
        return self._tensors[number]

    def take(self) -> list[torch.Tensor]:
        """All tensors, for the one who refers to them all."""
        tensors = [self.get(number) for number in sorted(self._referred_to)]
        self._tensors.clear()
        return tensors


class _Kept:
    """A tensor that is saved for the backward through whatever hooks are set: a segment around drops it and brings it back."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Without its graph: it would hold the node that holds it.
        # Its output stays, too: before torch 2.13 the node alone does not hold what it has saved.
        self._held = _Save.apply(_root(), tensor.detach())

    def get(self) -> torch.Tensor:
        """The tensor. A recomputation around hands it out once for each backward."""
        (tensor,) = self._held.grad_fn.saved_tensors
        return tensor  # type: ignore[no-any-return]


class _Save(torch.autograd.Function):
    """Saves a tensor and computes nothing."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise AssertionError("nobody differentiates it")


def _root() -> torch.Tensor:
    return torch.empty(0, requires_grad=True)


# -------------------------------------------------------------------- a stage before that saves its own output


@dataclass(slots=True, eq=False)
class _Saved:
    """One saved tensor of a stage: itself, or where it is.

    Attributes:
        storage: Its memory, not held.
        shape: Its size.
        stride: Its layout.
        offset: Its place in its memory.
        dtype: Its type.
        device: Where it is.
        tensor: The tensor, unless it is dropped or somewhere else.
        kept: What holds it.
        shown: The boundary that it shows, and which tensor of it.
    """

    storage: StorageWeakRef
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    tensor: torch.Tensor | None
    kept: _Kept | None = None
    shown: tuple[Boundary, int] | None = None

    def shows(self, tensor: torch.Tensor) -> bool:
        """Whether it is the same memory, read as the same numbers."""
        return (
            self.storage.cdata == identity_of(tensor.untyped_storage())
            and self.dtype == tensor.dtype
            and is_whole(tensor)
        )

    def stand_in(self) -> torch.Tensor:
        """A tensor of one element that looks like it to the segment around, which compares what its two passes save."""
        return torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)

    def get(self) -> torch.Tensor:
        if self.shown is not None:
            boundary, index = self.shown
            return boundary.get(index).as_strided(self.shape, self.stride, self.offset)
        if self.kept is not None:
            return self.kept.get()
        assert self.tensor is not None
        return self.tensor


class SavedOutput:
    """What a stage saves while :meth:`watching`, until it is known which of it is its output."""

    def __init__(self) -> None:
        self._saved: list[_Saved] = []

    def watching(self) -> saved_tensors_hooks:
        """Context in which the stage runs."""
        return saved_tensors_hooks(self._pack, _Saved.get)

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(
            StorageWeakRef(tensor.untyped_storage()),
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.device,
            # The first pass of a segment keeps nothing. Detached: an output would hold the node that holds it until a backward comes.
            None if is_checkpointing() else tensor.detach(),
        )
        self._saved.append(saved)
        return saved

    def refer(self, boundary: Boundary, outputs: Sequence[torch.Tensor]) -> None:
        """What shows the output refers to the boundary from now on; the rest goes where it would have gone without the watch."""
        found, self._saved = self._saved, []  # whoever holds the hooks must not hold these
        for saved in found:
            index = next((index for index, output in enumerate(outputs) if saved.shows(output)), None)
            if index is not None:
                saved.tensor, saved.shown = None, (boundary, index)
                boundary.refer(index)
            elif hooks_for_saved_tensors() is not None:
                saved.kept = _Kept(saved.stand_in() if saved.tensor is None else saved.tensor)
                saved.tensor = None


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor is dense and all of its memory, so that a copy of its numbers can stand for it."""
    memory = tensor.untyped_storage().nbytes()
    return tensor.nbytes == memory and torch.empty_like(tensor, device="meta").stride() == tensor.stride()


# -------------------------------------------------------------------- an inverted stage before


class Output:
    """How an inverted stage gets its output back.

    Attributes:
        name: Of the stage.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._source: list[_Kept] | Boundary | None = None
        self._is_given_up = False

    def refer(self, boundary: Boundary, outputs: Sequence[torch.Tensor]) -> None:
        """The stage behind rebuilds it."""
        self._source = boundary
        boundary.refer(*range(len(outputs)))

    def keep(self, outputs: Sequence[torch.Tensor]) -> None:
        """It stays until the backward."""
        self._source = [_Kept(output) for output in outputs]

    def get(self, *, for_good: bool) -> list[torch.Tensor]:
        """The output.

        Args:
            for_good: No other backward needs it.
        Raises:
            ExecutionError: It is not there any more.
        """
        match self._source:
            case Boundary() as boundary:
                return boundary.take()
            case None:
                raise second_backward(self.name)
            case kept:
                if for_good:
                    self._source, self._is_given_up = None, True
                return [each.get() for each in kept]

    def require_there(self, *_: Any) -> None:
        """Check that no backward has given it up.

        Raises:
            ExecutionError: One has.
        """
        if self._is_given_up:
            raise second_backward(self.name)


def second_backward(name: str) -> ExecutionError:
    """The error for a backward through an inverted stage of which an earlier one has given up the output."""
    return ExecutionError(
        f"{name!r} is rebuilt again after a backward that did not keep the graph: pass retain_graph=True to all but the last backward"
    )
