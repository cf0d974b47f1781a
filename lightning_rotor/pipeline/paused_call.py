"""User code that calls the pipeline in the middle, and waits there until the pipeline has its answer.

A training step runs once for each micro-batch, and 1F1B needs the loss of the first before the last has begun. So all
run up to the call of the pipeline and wait there, each in a thread of its own, of which at any time one runs::

    main thread   start ──┐        ┌─► start the next ... pipeline: forward, loss? ──┐          ┌─► backward ...
    the step's            └─► net(x)                                                 └─► loss ──┘
"""

import threading
from collections.abc import Callable
from contextvars import ContextVar
from queue import SimpleQueue
from typing import Any

import torch

from lightning_rotor.devices import kind_of
from lightning_rotor.errors import PipelineError
from lightning_rotor.execution.settings import Settings
from lightning_rotor.pipeline.micro_batch_seeds import OUTSIDE, mixed
from lightning_rotor.pipeline.micro_batches import Call
from lightning_rotor.stages.generators import GeneratorStates, seeded


def never_called(what: str) -> PipelineError:
    """The error for user code that does not come to the module."""
    return PipelineError(
        f"{what} never called the module that is cut into pipeline stages: expected one call of it. Name the module "
        'that it calls: RotorPipelineStrategy(module="...")'
    )


class PausedCall:
    """Code that calls the pipeline once and waits there, in a thread with random numbers and settings of its own.

    Args:
        run: The code.
        place: Number of the micro-batch that it works on.
        device: On which it computes.
        seed: The step's.
        what: The code's name in messages.
    Attributes:
        context: The settings under which the code called the pipeline; those of its start before.
    """

    def __init__(
        self,
        run: Callable[[], Any],
        place: int,
        device: torch.device,
        *,
        seed: int,
        what: str,
    ) -> None:
        self.place = place
        self._run, self._device, self._what = run, device, what
        with seeded(mixed(mixed(seed, place), OUTSIDE), host=False):
            self._generators = GeneratorStates(device, host=False)
        # Generators are the process's and settings are the thread's or the process's. So the code has its own between
        # its turns, and whoever runs meanwhile has theirs.
        self.context = self._settings = Settings()
        # To the thread: that it may begin, then the pipeline's answer. From it: an error, or the call and the result.
        self._heard: SimpleQueue[Any] = SimpleQueue()
        self._said: SimpleQueue[tuple[BaseException | None, Any]] = SimpleQueue()
        self._has_called = False
        # A daemon: code that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"lightning-rotor {what}", daemon=True)

    # ---------------------------------------------------------------- in the main thread

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
                self._heard.put(GeneratorExit)
                self._thread.join()

    # ---------------------------------------------------------------- in the code's thread

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the pipeline from the code's thread: wait for the answer."""
        self._require_one_call()
        self._has_called = True
        self.context = Settings()
        self._said.put((None, (args, kwargs)))
        # The pipeline decides how long its input lives.
        del args, kwargs
        answer = self._heard.get()
        if answer is GeneratorExit:
            # It unwinds the code, and a user's ``except Exception`` does not stop it.
            raise GeneratorExit
        return answer

    def _require_one_call(self) -> None:
        if self._has_called:
            how = "twice"
        elif not torch.is_grad_enabled():
            how = "under no_grad"
        else:
            return
        raise PipelineError(
            f"{self._what} called the module that is cut into pipeline stages {how}: expected one call of it, with "
            "gradients. Let one call take both inputs, or let module=... name a part that is called once"
        )

    def _work(self) -> None:
        self._heard.get()
        current.set(self)
        try:
            # A new thread computes on the first device.
            kind_of(self._device).make_current(self._device)
            with self.context.restored():
                result = self._run()
        except GeneratorExit:
            return
        except BaseException as error:
            # The main thread raises it.
            self._said.put((error, None))
        else:
            self._said.put((None, result))


current: ContextVar[PausedCall | None] = ContextVar("current", default=None)
"""The paused call that runs in this thread, or None."""
