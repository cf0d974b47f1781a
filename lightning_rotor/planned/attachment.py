"""Another forward in the place of a module's own, and the way back.

It stands in the instance's ``__dict__``, so that the class, its subclasses and other instances are as they were, and
whatever calls the module (hooks, wrappers, the user's code) calls it as before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial, wraps
from types import MethodType
from typing import Any, Protocol

from torch import nn

from lightning_rotor.errors import ModelError
from lightning_rotor.private.torch_names import (
    CompiledCall,
    compiled_method_of,
    is_captured,
    is_compiler_wrapper,
    module_inside,
)

# Keys of a module's ``__dict__``: what runs in the place of its forward; and the user's compiled code that it has
# pushed aside, by the key under which that stood.
_KEY = "_lightning_rotor"
_COMPILED = "_lightning_rotor_compiled"


class ForwardInPlace(Protocol):
    """A stand-in for a module's ``forward``. A copy of it, in a copied module, runs the module plainly."""

    @property
    def compiled(self) -> CompiledCall | None:
        """The compiled whole that this stands in for; None if it stands in for the code inside."""

    @property
    def active(self) -> bool:
        """True if no other plan may take this module, or one inside or around it; copies, for one, claim nothing."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Output of ``module``, which may be a copy of the one that this was attached to."""


@lru_cache(128)
def _in_place_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that stands in for a class's ``forward``, and says that it has the same arguments."""
    # It becomes a bound method in the instance's __dict__, named like the one that it replaces: copy and pickle then
    # bind it to the copy, which a closure over the module would not survive.

    @wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # torch.export, torch.jit and ONNX take the computation down for another runtime, and want the module as the
        # user wrote it.
        if is_captured():
            return plain_forward(self)(*args, **kwargs)
        return self.__dict__[_KEY](self, args, kwargs)

    forward.__name__ = "forward"
    return forward


def plain_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward that the user wrote for a module; the call of what is inside of what the compiler returned."""
    if is_compiler_wrapper(module):
        return module_inside(module).__call__
    # torch.export follows a partial, and not a method that is made here.
    return partial(type(module).forward, module)


def attach(module: nn.Module, planned: ForwardInPlace) -> None:
    """Run a module through a planned forward from now on; ``ModelError`` if its ``forward`` is already replaced.

    What ``torch.compile(module.forward)`` has returned may stand there. It comes back with :func:`detach`.
    """
    is_replaced = "forward" in module.__dict__
    # The forward of a copy may stay, and is replaced again.
    is_of_a_copy = _KEY in module.__dict__ and not is_attached(module)
    slot = "forward"
    compiled = None if is_attached(module) else compiled_method_of(module, "forward")
    if planned.compiled is not None:
        slot, compiled = planned.compiled.slot, module.__dict__.get(planned.compiled.slot)
    if compiled is None and is_replaced and not is_of_a_copy:
        raise ModelError(
            f"the forward of this {type(module).__name__} has been replaced already: expected a module that only one "
            "callback or patch works on. torch.compile of a whole LightningModule replaces its forward too: name one "
            "of its submodules"
        )
    # In this order: an interrupt in between leaves a module that runs its own forward.
    # Only where there is something: an attribute that comes and goes would count as a change of the module.
    if compiled is not None:
        module.__dict__[_COMPILED] = {slot: compiled}
    module.__dict__[_KEY] = planned
    written = module_inside(module) if is_compiler_wrapper(module) else module
    module.__dict__[slot] = MethodType(_in_place_of(type(written).forward), module)


def detach(module: nn.Module, planned: ForwardInPlace | None = None) -> None:
    """Undo :func:`attach`, of ``planned`` if given. Does nothing if it was undone before."""
    attached = module.__dict__.get(_KEY)
    if attached is not None and planned in (None, attached):
        slot = "forward" if attached.compiled is None else attached.compiled.slot
        module.__dict__.pop(slot, None)
        module.__dict__.update(module.__dict__.get(_COMPILED, {}))
        # Last, so that it can be done again after an interrupt in between.
        del module.__dict__[_KEY]
        module.__dict__.pop(_COMPILED, None)


def is_attached(module: nn.Module, *, besides: ForwardInPlace | None = None) -> bool:
    """True if a module runs through a planned forward, one other than ``besides`` if given."""
    # A copy of the module has one as well, which runs it plainly.
    planned: ForwardInPlace | None = module.__dict__.get(_KEY)
    return planned is not None and planned.active and planned is not besides


class PlainForward:
    """Stands in a copied module (an averaged model, a pickled checkpoint), and runs the copy plainly."""

    active = False
    compiled = None

    def __reduce__(self) -> tuple[Any, ...]:
        return inactive, ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Output of the module."""
        return plain_forward(module)(*args, **kwargs)


def inactive() -> PlainForward:
    """A copy's forward. Pickled models name this function."""
    return PlainForward()
