"""Contexts in which a user's module runs for real, and everything stays as it was."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_rotor.execution.lent_tensors import Slot, buffers_of, copies_of, standing_in
from lightning_rotor.execution.passes import forget_casts, repeating
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.sharding import as_found, units_in
from lightning_rotor.private.undoing import undone
from lightning_rotor.private.values import is_fake, tensors_in
from lightning_rotor.stages.draws import DrawsSeen
from lightning_rotor.stages.generators import GeneratorStates
from lightning_rotor.stages.other_threads import others_may_draw
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.stages.snapshot import Snapshot


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextmanager
def undisturbed(device: torch.device) -> Iterator[GeneratorStates]:
    """Context that computes with gradients, sets generators back and tells users' code that this is no training step.

    Saved tensors are kept plainly, whatever hooks are set around the call (a checkpoint of the user's, say). Whoever
    knows from which generators the code draws says so to what this yields.
    """
    generators = GeneratorStates(device)
    # Detached: a node that saves its own output would hold the tensor that holds it, and neither would be freed.
    kept_plainly = saved_tensors_hooks(torch.Tensor.detach, _unchanged)

    def put_back() -> None:
        generators.restore()
        forget_casts()

    with undone(put_back), torch.enable_grad(), repeating(), kept_plainly:
        yield generators


@contextmanager
def kept_attributes(stage: Stage, *, keep_parameters: bool = True) -> Iterator[Snapshot]:
    """Set back at the end all that the stage's modules, their code and hooks can reach, and parameters if asked."""
    before = Snapshot([module for _, module in stage.submodules()], code=True)
    parameters: AbstractContextManager[Any] = nullcontext()
    if keep_parameters:
        parameters = kept_parameters(stage)
    with undone(before.restore), as_found(stage.modules), parameters:
        yield before


@contextmanager
def draws_seen(stage: Stage) -> Iterator[Collection[str]]:
    """Context that notes which of torch's generators the stage draws from, in this thread, as far as Python sees it."""
    # Looking is a function mode, which compiled code would be compiled anew for. Without other threads a comparison of
    # states tells the same at once.
    if not others_may_draw() or any(map(private.is_compiled, stage.called_modules())):
        yield ()
        return
    with DrawsSeen() as seen:
        yield seen.kinds


class _CopiesBeforeWrites(private.TorchDispatchMode):
    """Copies parameters before operations change them in place. It slows them down, so nothing is timed under it."""

    supports_higher_order_operators = True

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        # Putting back is not counted, as writing to .data is not: it would look like a change of the user's.
        self._kept: list[tuple[nn.Parameter, torch.Tensor]] = []
        # By memory, those that nothing has written to yet. An operation may write to a view of one.
        self._waiting: dict[int, torch.Tensor] = {}
        for parameter in parameters:
            data = parameter.data
            self._kept.append((parameter, data))
            self._waiting[_memory_of(data)] = data
        # What operations have written to, and what it was. A forward rarely writes to parameters, so copies of all
        # would be memory and time for nothing.
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy those of these tensors that count, before they are written to."""
        for tensor in tensors:
            data = self._waiting.pop(_memory_of(tensor), None)
            if data is not None:
                self._copies.append((data, data.clone()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, private.OpOverload):
            for written in private.written_arguments(func, args, kwargs):
                self.copy(tensors_in(written))
        return func(*args, **kwargs)

    def restore(self) -> list[nn.Parameter]:
        """Put all back; returns those that had changed."""
        written = {_memory_of(data) for data, _ in self._copies}
        changed = []
        for parameter, data in self._kept:
            memory = _memory_of(data)
            has_other_data = _memory_of(parameter) != memory
            if has_other_data or memory in written:
                changed.append(parameter)
            if has_other_data:
                parameter.data = data
        for data, copy in self._copies:
            data.copy_(copy)
        return changed


@contextmanager
def kept_parameters(stage: Stage, known: Iterable[nn.Parameter] | None = None) -> Iterator[list[nn.Parameter]]:
    """Set back parameters that the stage's forward changes; yields a list that then has them and those it replaced.

    Those of FSDP's units and around compiled code are left alone, and NumPy's writes are not seen. What runs is watched
    unless ``known`` names the parameters, which costs no time.
    """
    changed: list[nn.Parameter] = []
    parameters = list(filter(_has_values, _parameters_of(stage)))
    # FSDP frees what it gathers, so a copy would be of memory that is somebody else's by then.
    if not parameters or units_in(stage.modules):
        yield changed
        return
    # Code under a dispatch mode is not compiled.
    if any(map(private.is_compiled, stage.called_modules())):
        yield changed
        return
    copies = _CopiesBeforeWrites(parameters)
    copies.copy(known or ())
    try:
        with copies if known is None else nullcontext():
            yield changed
    finally:
        present = _parameters_of(stage)
        changed += copies.restore()
        for parameter in parameters:
            # One that was exchanged for another has changed as well, though nobody wrote to it.
            if parameter not in present:
                changed.append(parameter)


def _parameters_of(stage: Stage) -> dict[nn.Parameter, None]:
    """Parameters of a stage, and those that it reads without calling their module, each once."""
    parameters = dict.fromkeys(stage.parameters())
    for module, name in stage.direct_reads():
        parameter = module._parameters.get(name)
        if parameter is not None:
            parameters[parameter] = None
    return parameters


def _has_values(tensor: Any) -> bool:
    if tensor.layout is not torch.strided or is_fake(tensor):
        return False
    # A distributed tensor is made of others, and has no memory of its own.
    return not private.is_traceable_wrapper_subclass(tensor)


def _memory_of(tensor: torch.Tensor) -> int:
    # No memory is known by 0.
    if tensor.layout is not torch.strided:
        return 0
    return private.identity_of(tensor.untyped_storage())


@contextmanager
def lent_buffers(stage: Stage) -> Iterator[list[tuple[nn.Module, str, torch.Tensor]]]:
    """Give the stage copies of its buffers meanwhile; yields the slots with the originals, which stay unchanged."""
    modules = dict.fromkeys(module for _, module in stage.submodules())
    originals = list(buffers_of(modules))
    loans: list[Slot] = []
    for module, name, copy in copies_of(originals):
        loans.append((module._buffers, name, copy))
    with standing_in(loans):
        yield originals
