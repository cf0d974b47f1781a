"""Caches of keys and values, which models of transformers fill in training though nobody reads them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_rotor.planned.attachment import inactive
from lightning_rotor.private.undoing import undone
from lightning_rotor.private.values import attribute_of

_log = logging.getLogger(__name__)


class KeyValueCaches:
    """Caches for generating text, which models of transformers fill in training, too, unless told not to.

    They keep keys and values of all layers, which nobody reads in training. transformers leaves them out under its own
    checkpointing as well.
    """

    def __init__(self, module: nn.Module) -> None:
        # Of all submodules: an encoder and a decoder, or an adapter around a model, have a config each.
        attributes = [attribute_of(each, "config") for each in module.modules()]
        configs = {id(config): config for config in attributes if _is_of_transformers(type(config))}
        # Set in their namespaces, as their classes take microseconds to set an attribute.
        namespaces = [vars(config) for config in configs.values()]
        self._configs = [namespace for namespace in namespaces if namespace.get("use_cache") is True]
        self._has_told = False

    def __bool__(self) -> bool:
        return bool(self._configs)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Context in which they are left out, unless a call asks for them."""
        if self._configs and not self._has_told:
            self._has_told = True
            # No warning: transformers does the same under its own checkpointing, and its users expect it.
            _log.info("it trains with use_cache=False, without past_key_values in its output, as nobody reads them")
        # Switched on again after an error, too: the next call may generate text, which takes a forward of the whole
        # text for each token without caches.
        with undone(self._switch_on):
            for config in self._configs:
                config["use_cache"] = False
            yield

    def _switch_on(self) -> None:
        for config in self._configs:
            config["use_cache"] = True


def _is_of_transformers(kind: type) -> bool:
    return any(base.__module__.startswith("transformers.") for base in kind.__mro__)


class ForwardWithoutCaches:
    """Runs a module whose parts are planned, and which would ask them for caches that nobody reads in training."""

    active = False  # a plan for the module, or for what is inside of it, is not in its way
    compiled = None

    def __init__(self, caches: KeyValueCaches) -> None:
        self._caches = caches

    def __reduce__(self) -> tuple[Any, ...]:
        return inactive, ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Output of the module."""
        if not (module.training and torch.is_grad_enabled()):
            return type(module).forward(module, *args, **kwargs)
        with self._caches.off():
            return type(module).forward(module, *args, **kwargs)
