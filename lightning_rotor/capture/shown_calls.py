"""Calls of modules and of autograd functions, which no mode of torch sees, shown to a recorder.

The methods of torch's classes are replaced for the time of a recording. There is no public hook before a module's own
hooks run, and none at all around ``torch.autograd.Function.apply``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from lightning_rotor.capture.dispatch_check import DispatchCheck
from lightning_rotor.private.undoing import undone

_showing = threading.RLock()
"""Held while methods are replaced: another thread that records waits."""


class Listener(Protocol):
    """Hears of calls."""

    check: DispatchCheck

    def call_module(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a module, by the ``call`` that ``nn.Module`` has by itself, and return its output."""

    def call_function(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        own_code: str,
    ) -> Any:
        """Call the ``apply`` of an autograd function, which is the user's code of this name."""


@contextmanager
def shown_calls(listener: Listener) -> Iterator[None]:
    """Context in which this thread's calls of modules and autograd functions go to the listener."""
    thread = threading.get_ident()

    def is_unheard() -> bool:
        # What runs inside of a recorded operation is not recorded, nor is what other threads do meanwhile.
        return bool(listener.check.inside) or threading.get_ident() != thread

    def shown_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_unheard():
            return call_module(module, *args, **kwargs)
        return listener.call_module(module, call_module, args, kwargs)

    def shown_init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        # A module that the forward makes anew in each call, as a loss, is code like any other and no hidden leaf.
        listener.check.note_module(module)
        init(module, *args, **kwargs)

    def shown_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        target = apply.__get__(None, cls)
        if is_unheard():
            return target(*args, **kwargs)
        # A reference that was kept from before (``f = Function.apply``) is not seen. There the operations inside are,
        # under no_grad.
        return listener.call_function(target, args, kwargs, own_code=f"{cls.__name__}.apply")

    replacements: tuple[tuple[Any, str, Any], ...] = (
        (nn.Module, "__call__", shown_call),
        (nn.Module, "__init__", shown_init),
        (torch.autograd.Function, "apply", classmethod(shown_apply)),
    )
    with _showing:
        originals = [vars(owner)[name] for owner, name, _ in replacements]
        # Which the replacements above call. They run once these are bound.
        call_module, init, apply = originals

        def put_back() -> None:
            for (owner, name, _), original in zip(replacements, originals, strict=True):
                setattr(owner, name, original)

        with undone(put_back):
            for owner, name, replacement in replacements:
                setattr(owner, name, replacement)
            yield
