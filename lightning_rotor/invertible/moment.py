"""One call of a module that will be undone and repeated: what it saw, and how to see that again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from lightning_rotor.generators import GeneratorStates
from lightning_rotor.private.torch_names import version_of
from lightning_rotor.recomputation import repeating
from lightning_rotor.sequential import Stage
from lightning_rotor.state import FirstPass, Replay, SegmentState, state_of


class Moment:
    """The state of generators, buffers, attributes and autocast at one call of a module.

    :meth:`first` wraps the call; :meth:`again` wraps whatever undoes or repeats it. Of what the call did not use nothing is kept: the
    generators only if it drew, buffers only if it changed them.

    Args:
        module: Whose call it is.
        device: Of its input.
        keep_buffers: Keep all buffers, and let the first call work on copies as well, so that nothing in the module changes.
        state: What the module may change, if somebody has found out before.
        may_draw: Whether it may draw random numbers.
        name: Of the module, for messages.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        *,
        keep_buffers: bool = False,
        state: SegmentState | None = None,
        may_draw: bool = True,
        name: str = "",
    ) -> None:
        self._stage = Stage(type(module).__name__, (module,))
        self._root = module, name
        self._device = device
        self._keep_buffers = keep_buffers
        self._known_state = state
        self._may_draw = may_draw
        self._first_pass = FirstPass(
            dataclasses.replace(self._state(), statistics=())
        )  # scratch is made when it is needed
        self._generators: GeneratorStates | None = None
        self._autocast = tuple(
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in dict.fromkeys(("cpu", "cuda", device.type))
            if torch.amp.is_autocast_available(kind)
        )
        self._cache = torch.is_autocast_cache_enabled()

    @property
    def draws_random(self) -> bool:
        """Whether the first call drew random numbers."""
        return self._generators is not None

    @contextmanager
    def first(self) -> Iterator[None]:
        """Context of the first call.

        Raises:
            ExecutionError: The call changes parameters, or large buffers, which it reads again later.
        """
        buffers = [(slots, name, slots[name], _version(slots[name])) for slots, name in self._remembered()]
        with self._first_pass:
            self._first_pass.generators = None  # they are among ours
            before = GeneratorStates(self._device) if self._may_draw else None
            with ExitStack() as stack:
                if self._keep_buffers:
                    stack.enter_context(Replay(self._first_pass))
                    stack.enter_context(repeating())
                yield
            if before is not None and not before.equals(GeneratorStates(self._device)):
                self._generators = before
        if not self._keep_buffers:
            changed = {
                (id(slots), name)
                for slots, name, buffer, version in buffers
                if slots[name] is not buffer or _version(buffer) != version
            }
            unchanged = [
                (slots, name, buffer) for slots, name, buffer, _ in buffers if (id(slots), name) not in changed
            ]
            self._first_pass.read = self._first_pass.state.tensors_read(unchanged)
            self._first_pass.values = [
                (module, name, value)
                for module, name, value in self._first_pass.values
                if (id(module._buffers), name) in changed
            ]
        clear_autocast_cache()

    def require_unchanged(self) -> None:
        """Check that the call would read the parameters and buffers that it has read.

        Raises:
            ExecutionError: One of them has changed.
        """
        self._first_pass.read.require_unchanged()

    @contextmanager
    def again(self, parameters: Mapping[int, torch.Tensor] | None = None) -> Iterator[None]:
        """Context of the inverse, or of another forward: sees what the first call saw, and leaves everything as it is.

        Args:
            parameters: What to use in the place of parameters, by the ``id`` of each.
        """
        replayed = FirstPass(dataclasses.replace(self._first_pass.state, statistics=self._state().statistics))
        replayed.values = self._first_pass.values
        replayed.before, replayed.observers = self._first_pass.before, self._first_pass.observers
        replayed.settings, replayed.layers = self._first_pass.settings, self._first_pass.layers
        replayed.read = self._first_pass.read.standing_in(parameters or {})
        with ExitStack() as stack:
            stack.enter_context(repeating())
            if self._generators is not None:
                stack.callback(GeneratorStates(self._device).restore)
                self._generators.restore()
            stack.enter_context(Replay(replayed))
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled, cache_enabled=self._cache))
            stack.callback(clear_autocast_cache)
            yield

    def _state(self) -> SegmentState:
        if self._known_state is not None:
            return self._known_state
        state = dataclasses.replace(state_of(self._stage, (), {}), root=self._root)
        if self._keep_buffers:
            owners = tuple(dict.fromkeys(module for _, module in self._stage.submodules() if module._buffers))
            return dataclasses.replace(state, statistics=(), watched=(), remembered=owners, buffered=())
        return state

    def _remembered(self) -> Iterator[tuple[dict[str, torch.Tensor | None], str]]:
        for module in self._first_pass.state.remembered:
            for name in module._buffers:
                yield module._buffers, name


def clear_autocast_cache() -> None:
    """Forget the weights that autocast has cast: those cast without gradients must not serve a forward with them, and none be pinned."""
    if torch.is_autocast_cache_enabled() and any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        torch.clear_autocast_cache()


def _version(buffer: torch.Tensor | None) -> int:
    return 0 if buffer is None else version_of(buffer)
