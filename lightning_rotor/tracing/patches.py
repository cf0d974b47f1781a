"""What has to be another while a forward runs on symbols, because ``torch.fx`` does not see it by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn

from lightning_rotor.private import torch_names as private
from lightning_rotor.tracing.modules import UntraceableError
from lightning_rotor.tracing.proxies import IN_PLACE
from lightning_rotor.tracing.replaced import replaced


@contextmanager
def patched() -> Iterator[None]:
    """Context in which the tracer sees autograd functions, assignments to buffers, and checks of sizes."""
    with ExitStack() as stack:
        stack.enter_context(replaced(torch.autograd.Function, "apply", _applying))
        stack.enter_context(replaced(nn.Module, "__setattr__", _assigning))
        stack.enter_context(replaced(*private.CHECK, _checking))
        stack.enter_context(replaced(*private.DTYPE_OF_MASK, _telling_dtypes))
        yield


def _applying(original: Any) -> Any:
    """An ``autograd.Function`` takes a proxy for a plain object: its forward would be traced, and its backward be lost."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        function = original.__get__(None, cls)
        tracers = [value.tracer for value in (*args, *kwargs.values()) if isinstance(value, fx.Proxy)]
        if tracers:
            return tracers[0].create_proxy("call_function", function, args, kwargs)
        if _has_proxy(args, kwargs):
            raise UntraceableError("it hands tensors in containers to an autograd.Function")
        return function(*args, **kwargs)

    return classmethod(apply)


def _assigning(original: Any) -> Any:
    """``self.count += 1`` on a buffer: the operation is recorded, and the object stays the same."""

    def assign(self: nn.Module, name: str, value: Any) -> None:
        if isinstance(value, fx.Proxy) and value.node.target in IN_PLACE:
            changed = value.node.args[0]
            slots = {**self._buffers, **self._parameters}
            if name in slots and isinstance(changed, fx.Node) and changed.op == "get_attr":
                owners: dict[str, tuple[nn.Module, str]] = getattr(value.tracer, "owners", {})
                owner, key = owners.get(str(changed.target), (None, ""))
                if owner is self and key == name:
                    return
        original(self, name, value)

    return assign


def _checking(original: Any) -> Any:
    """It wants a bool, which a symbol turns into where it can."""

    def check(error: Any, condition: Any, message: Any = None) -> None:
        original(error, bool(condition), message)

    return check


def _telling_dtypes(original: Any) -> Any:
    """It asks with isinstance whether a mask is a tensor, and then for its type."""

    def dtype_of(value: Any) -> Any:
        return value.dtype if isinstance(value, fx.Proxy) else original(value)

    return dtype_of


def _has_proxy(*values: Any) -> bool:
    found = False

    def look(value: Any) -> Any:
        nonlocal found
        found = found or isinstance(value, fx.Proxy)
        return value

    fx.node.map_aggregate(values, look)
    return found
