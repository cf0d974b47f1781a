"""The conditions under which a recording holds for a call.

The recorded code does not run any more, so whatever could have sent it another way must be noticed when it changes::

    call ──► another key? ──► modules changed? ──► values outside changed? ──► sizes and values answered the same?
             (call)           (watch)              (notes)                     (size_guards)

All of this is asked at every training call, in a few microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_rotor.capture.ambient import ambient
from lightning_rotor.capture.call import Call, firsts_of
from lightning_rotor.capture.copies import Copies
from lightning_rotor.capture.size_guards import SizeGuards
from lightning_rotor.capture.unread_arguments import differing_leaves, without_leaves
from lightning_rotor.capture.watch import Watch
from lightning_rotor.private.values import attributes_of
from lightning_rotor.stages.wiring import packed


class CallGuards:
    """Say whether a recording holds for a call, and what its chain takes then.

    It does not hold if another plain argument differs, the module has noticeably changed, or the forward would read
    other values out of tensors. Sizes may differ in dimensions recorded with two sizes.

    Args:
        call: The recorded one.
        watch: The looks of the modules in it.
        sizes: Questions about sizes and values.
        reads: Numbers of the inputs that the chain takes.
    """

    def __init__(
        self,
        call: Call,
        watch: Watch,
        sizes: SizeGuards,
        *,
        reads: Sequence[int],
    ) -> None:
        self.module = call.module
        self.attributes = call.attributes
        self.watch = watch
        self._key = _key(call)
        # Plain arguments that the code does not read.
        self._free: frozenset[int] = frozenset()
        self._sizes = sizes
        self._reads = reads

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The chain's input for a call, or None if the recording does not hold for it."""
        call = self.call(args, kwargs)
        # The cheap questions first: flattening and comparing takes microseconds, asking values runs operations.
        if not self.are_like(call):
            return None
        # Mostly this very signature has been found to hold before.
        signature = call.signature
        if signature in self._sizes.settled or self._sizes.hold(signature, call.inputs):
            return self.take(call)
        return None

    @property
    def asks_values(self) -> bool:
        """True if values of tensors decide over what the code does."""
        return self._sizes.asks_values

    def bind_unasked(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The chain's input for a call that differs at most in sizes and values; None if it differs in more."""
        call = self.call(args, kwargs)
        return self.take(call) if self.are_like(call) else None

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """A call of the module, with the attributes that are inputs."""
        return Call.of(self.module, args, kwargs, self.attributes)

    def are_like(self, call: Call) -> bool:
        """True if a call differs at most in sizes and values, and the module is what it was."""
        return bool(self._key_of(call) == self._key) and self.watch.holds()

    def fit(self, call: Call) -> bool:
        """True if a call differs at most in sizes and values, whatever the module is now."""
        return bool((self._key, self.attributes) == (self._key_of(call), call.attributes))

    def differing(self, call: Call) -> frozenset[int]:
        """Places of the plain arguments in which a call differs from the recorded one, and in no more.

        Empty if it differs in more than that, or in nothing.
        """
        arguments, *rest = self._key_of(call)
        recorded, *recorded_rest = self._key
        if rest != recorded_rest or call.attributes != self.attributes:
            return frozenset()
        places = differing_leaves(recorded, arguments)
        if not places or not self.watch.holds():
            return frozenset()
        is_known = call.signature in self._sizes.settled or self._sizes.hold(call.signature, call.inputs)
        return places if is_known else frozenset()

    def free(self, places: frozenset[int]) -> None:
        """Let plain arguments in these places be any, as the code does not read them."""
        arguments, *rest = self._key
        self._key = without_leaves(arguments, places), *rest
        self._free |= places

    def _key_of(self, call: Call) -> Any:
        """The key of a call, with any value in the place of what is not read."""
        key = _key(call)
        if not self._free:
            return key
        arguments, *rest = key
        return without_leaves(arguments, self._free), *rest

    def take(self, call: Call) -> Any:
        """The chain's input for a call for which the recording is known to hold: the tensors that it reads."""
        return packed([call.inputs[number] for number in self._reads])


def _key(call: Call) -> Any:
    """All that code can tell of a call besides sizes and values, comparable."""
    kinds = tuple([_seen_as_input(value) if isinstance(value, torch.Tensor) else type(value) for value in call.inputs])
    # Code may ask whether two tensors are one, and whether autocast is on. Hooks on saved tensors do not count, for
    # stages run under whatever hooks are set.
    return call.key, firsts_of(call.tensors), ambient().without_hooks, kinds


def _seen_as_input(tensor: torch.Tensor) -> Any:
    """Facts about an input that code can tell besides sizes and values."""
    attributes = attributes_of(tensor)
    own = Copies().of(attributes) if attributes else None
    return type(tensor), tensor.dim(), tensor.dtype, tensor.device, own
