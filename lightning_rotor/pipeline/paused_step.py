r"""A user's code that stops where it calls the pipeline, and goes on when the pipeline has the output.

A training step runs once for each micro-batch, and 1F1B needs the loss of the first before the last has begun. So all of them run up to the
call, wait there, and go on one by one, each in a thread of its own, of which at any time only one runs::

    main thread   start ──┐        ┌─► start the next ... pipeline: forward, loss? ──┐          ┌─► backward ...
    the step's            └─► net(x)                                                 └─► loss ──┘
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from lightning_rotor.pipeline.schedule import PipelineError
from lightning_rotor.pipeline.surroundings import Surroundings, seeded
from lightning_rotor.stages.state import Settings


class _Abandoned(BaseException):
    """Unwinds code that will never go on. No ``except Exception`` of a user's stops it."""


class _Current(threading.local):
    call: SuspendedCall | None = None


_current = _Current()


def suspended_call() -> SuspendedCall | None:
    """The one whose thread this is."""
    return _current.call


class SuspendedCall:
    """Code that calls the pipeline once, in a thread of its own.

    torch's random numbers in it are its own, whenever it runs, and so are torch's settings. It begins under those of whoever makes it.

    Args:
        run: The code.
        seed: Of its random numbers.
        device: Where it computes.
        what: For messages.

    Attributes:
        surroundings: Of the call of the pipeline, once it waits there.
    """

    def __init__(self, run: Callable[[], Any], *, seed: int, device: torch.device, what: str = "training_step") -> None:
        self._run, self._device, self._what = run, device, what
        with seeded(seed):
            self._generators = _states(device)
        self.surroundings = Surroundings()
        self._settings = Settings()
        self._mine, self._theirs = threading.Semaphore(0), threading.Semaphore(0)
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._answer: Any = None
        self._result: Any = None
        self._error: BaseException | None = None
        self._abandoned = False
        self._thread = threading.Thread(target=self._work, name=f"lightning-rotor {what}", daemon=True)

    def start(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run up to the call.

        Returns:
            Arguments of the call.
        Raises:
            PipelineError: It never calls the pipeline.
        """
        self._thread.start()
        self._turn()
        if self._arguments is None:
            raise PipelineError(
                f"{self._what} never called the module that is cut into pipeline stages: expected one call of it. Name the module that it calls: "
                'RotorPipelineStrategy(module="...")'
            )
        return self._arguments

    def finish(self, answer: Any) -> Any:
        """Go on behind the call.

        Args:
            answer: What the call gives.
        Returns:
            What the code gives.
        """
        self._answer, self._arguments = answer, None
        self._turn()
        self._answer = None
        result, self._result = self._result, None
        return result

    def abandon(self) -> None:
        """Never go on. Does nothing once the code has ended."""
        if self._thread.is_alive():
            self._abandoned = True
            with Settings().restored():
                self._mine.release()
                self._thread.join()

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In its thread: the pipeline is called."""
        if self._answer is not None or self._arguments is not None:
            raise PipelineError(
                f"{self._what} called the module that is cut into pipeline stages twice: expected one call of it"
            )
        if not torch.is_grad_enabled():
            raise PipelineError(
                f"{self._what} called the module that is cut into pipeline stages under no_grad: expected one call with gradients"
            )
        self._arguments = args, kwargs
        self.surroundings = Surroundings()
        del args, kwargs
        self._theirs.release()
        self._mine.acquire()
        if self._abandoned:
            raise _Abandoned
        return self._answer

    def _work(self) -> None:
        self._mine.acquire()
        _current.call = self
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            with self.surroundings.restored():
                self._result = self._run()
        except _Abandoned:
            return
        except BaseException as error:  # the caller's thread raises it
            self._error = error
        finally:
            _current.call = None
            self._theirs.release()

    def _turn(self) -> None:
        """Let the other thread run until it waits or ends."""
        before = _states(self._device)
        _set(self._generators, self._device)
        with self._settings.restored():
            self._mine.release()
            self._theirs.acquire()
            self._settings = Settings()
        self._generators = _states(self._device)
        _set(before, self._device)
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def _states(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set(states: tuple[torch.Tensor, torch.Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1], device)
