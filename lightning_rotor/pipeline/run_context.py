"""What code finds around it wherever the pipeline runs it: random numbers, settings of torch, a thread to wait in.

In one process, dropout draws from one generator in turn. The stages of a pipeline run at the same time on several
devices, each with a generator of its own. So each stage of the chain that may draw gets numbers from three integers::

    the step's seed  ──┐      made of ``seed_everything``'s seed and the step's number: a resumed run goes on alike
    micro-batch k    ──┼──►  seed of the generator while stage i works on micro-batch k
    chain stage i    ──┘      -1 for what runs outside of the chain

Micro-batch ``k`` begins with the generator seeded by the first two. A stage reads that seed off the generator itself,
so recomputation, which restores the generator, finds the same. Seeds draw nothing from the user's generators.

A training step runs once for each micro-batch, and 1F1B needs the loss of the first before the last has begun. So all
run up to the call of the pipeline and wait there, each in a thread of its own, of which at any time one runs::

    main thread   start ──┐        ┌─► start the next ... pipeline: forward, loss? ──┐          ┌─► backward ...
    the step's            └─► net(x)                                                 └─► loss ──┘
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch

from lightning_rotor.chain import Chain
from lightning_rotor.execution.passes import Settings
from lightning_rotor.pipeline.schedule import PipelineError
from lightning_rotor.stages.generators import GeneratorStates, seeded
from lightning_rotor.stages.sequential import Stage, Wiring

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call."""


def call_with(sample: Any) -> Call:
    """A call with a sample: a tuple for several arguments, a dict for keywords."""
    if isinstance(sample, dict):
        return (), sample
    return sample if isinstance(sample, tuple) else (sample,), {}


OUTSIDE = -1
"""The place of what runs outside of the chain."""
_KINDS = ("cpu", "cuda")


def mixed(seed: int, place: int) -> int:
    """Seed made of a seed and a number (the finalizer of SplitMix64, so that neighbours have nothing in common)."""
    value = (seed + (place + 2) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (value ^ (value >> 31)) & ((1 << 63) - 1)


class _SeededStage(torch.nn.Module):
    """A stage that runs with random numbers of its own."""

    def __init__(self, way: Any, place: int) -> None:
        super().__init__()
        # Not a submodule: it is the user's, and stays where it is.
        self.__dict__["_way"] = way
        self._place = place

    def forward(self, value: Any) -> Any:
        with seeded(mixed(torch.initial_seed(), self._place), host=False):
            return self.__dict__["_way"](value)


def with_seeds(stages: Sequence[Stage], chain: Chain) -> tuple[Stage, ...]:
    """Stages of a chain; those that may draw random numbers get numbers of their own."""
    return tuple(
        replace(
            stage,
            modules=(_SeededStage(replace(stage, variants=()), place),),
            wiring=Wiring.of([stage.wiring.wire], stage.writes),
            variants=tuple(_SeededStage(variant, place) for variant in stage.variants),
        )
        if cost.draws_random
        else stage
        for place, (stage, cost) in enumerate(zip(stages, chain, strict=True))
    )


class RunContext:
    """Settings of torch, and the thread's autocast, as they are when it is made."""

    __slots__ = ("_autocast", "_settings", "dtypes")

    def __init__(self) -> None:
        self._settings = Settings()
        self._autocast = tuple(map(_autocast, _KINDS))
        self.dtypes = torch.get_default_dtype(), self._autocast

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context in which the settings hold again."""
        with ExitStack() as stack:
            stack.enter_context(self._settings.restored())
            for kind, wanted in zip(_KINDS, self._autocast, strict=True):
                if wanted != _autocast(kind):
                    enabled, dtype, caches = wanted
                    stack.enter_context(torch.autocast(kind, dtype, enabled, caches))
            yield


def _autocast(kind: str) -> tuple[bool, torch.dtype, bool]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


def never_called(what: str) -> PipelineError:
    """The error for user code that does not come to the module."""
    return PipelineError(
        f"{what} never called the module that is cut into pipeline stages: expected one call of it. Name the module "
        'that it calls: RotorPipelineStrategy(module="...")'
    )


class _Abandoned(BaseException):
    """Unwinds code that will never go on. A user's ``except Exception`` does not stop it."""


class PausedCall:
    """Code that calls the pipeline once and waits there, in a thread with random numbers and settings of its own."""

    def __init__(self, run: Callable[[], Any], *, seed: int, device: torch.device, what: str) -> None:
        self._run, self._device, self._what = run, device, what
        with seeded(seed, host=False):
            self._generators = GeneratorStates(device, host=False)
        self.context, self._settings = RunContext(), Settings()
        # To the thread: that it may begin, then the pipeline's answer. From it: an error, or the call and the result.
        self._heard: SimpleQueue[Any] = SimpleQueue()
        self._said: SimpleQueue[tuple[BaseException | None, Any]] = SimpleQueue()
        self._has_called = False
        self._thread = threading.Thread(target=self._work, name=f"lightning-rotor {what}", daemon=True)

    def start(self) -> Call:
        """Run up to the call of the pipeline, and return its arguments."""
        self._thread.start()
        arguments: Call = self.resume()
        if not self._has_called:
            raise never_called(self._what)
        return arguments

    def resume(self, answer: Any = None) -> Any:
        """Answer the call and let the code run on, until it calls or ends: its call's arguments, or its result."""
        before = GeneratorStates(self._device, host=False)
        self._generators.restore()
        with self._settings.restored():
            self._heard.put(answer)
            error, value = self._said.get()
            self._settings = Settings()
        self._generators = GeneratorStates(self._device, host=False)
        before.restore()
        if error is not None:
            raise error
        return value

    def abandon(self) -> None:
        """Unwind the code; does nothing once it has ended."""
        if self._thread.is_alive():
            with Settings().restored():
                self._heard.put(_Abandoned)
                self._thread.join()

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the pipeline from the code's thread: wait for the answer."""
        expected = None
        if self._has_called:
            expected = "twice: expected one call of it"
        elif not torch.is_grad_enabled():
            expected = "under no_grad: expected one call with gradients"
        if expected is not None:
            raise PipelineError(f"{self._what} called the module that is cut into pipeline stages {expected}")
        self._has_called, self.context = True, RunContext()
        self._said.put((None, (args, kwargs)))
        del args, kwargs
        answer = self._heard.get()
        if answer is _Abandoned:
            raise _Abandoned
        return answer

    def _work(self) -> None:
        self._heard.get()
        current.set(self)
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            with self.context.restored():
                result = self._run()
        except _Abandoned:
            return
        except BaseException as error:  # the caller's thread raises it
            self._said.put((error, None))
        else:
            self._said.put((None, result))


current: ContextVar[PausedCall | None] = ContextVar("current", default=None)
"""The paused call that runs in this thread, or None."""
