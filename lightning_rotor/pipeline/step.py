"""A module that runs as a pipeline: training steps around it, and whole batches without gradients.

A training step runs once for each micro-batch, and 1F1B needs the loss of the first before the last has begun. So all
run up to the call of the pipeline and wait there, each in a thread of its own, of which at any time one runs::

    main thread   start ──┐        ┌─► start the next ... pipeline: forward, loss? ──┐          ┌─► backward ...
    the step's            └─► net(x)                                                 └─► loss ──┘
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import chain
from queue import SimpleQueue
from typing import Any, Literal

import torch
from torch import nn

from lightning_rotor.devices import kind_of
from lightning_rotor.errors import PipelineError
from lightning_rotor.execution.settings import Settings
from lightning_rotor.pipeline.micro_batches import OUTSIDE, Call, join, mixed, rows_in, sizes_of, split
from lightning_rotor.pipeline.partition import RecomputeMode
from lightning_rotor.pipeline.partition.problem import check_recompute
from lightning_rotor.pipeline.pipeline_schedule import PipelineScheduleName, check_numbers
from lightning_rotor.pipeline.placement import Placement, first, outside
from lightning_rotor.pipeline.runner import PipelineRunner, run_backward
from lightning_rotor.planned.attachment import attach, detach, inactive
from lightning_rotor.private.values import tensors_in, tree_map_only
from lightning_rotor.stages.generators import GeneratorStates, seeded


def never_called(what: str) -> PipelineError:
    """The error for user code that does not come to the module."""
    return PipelineError(
        f"{what} never called the module that is cut into pipeline stages: expected one call of it. Name the module "
        'that it calls: RotorPipelineStrategy(module="...")'
    )


class PausedCall:
    """Code that calls the pipeline once and waits there, in a thread with random numbers and settings of its own."""

    def __init__(self, run: Callable[[], Any], place: int, device: torch.device, *, seed: int, what: str) -> None:
        self._run, self.place, self._device, self._what = run, place, device, what
        with seeded(mixed(mixed(seed, place), OUTSIDE), host=False):
            self._generators = GeneratorStates(device, host=False)
        self.context = self._settings = Settings()
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
                self._heard.put(GeneratorExit)
                self._thread.join()

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the pipeline from the code's thread: wait for the answer."""
        how = "twice" if self._has_called else None if torch.is_grad_enabled() else "under no_grad"
        if how is not None:
            raise PipelineError(
                f"{self._what} called the module that is cut into pipeline stages {how}: expected one call of it, with "
                "gradients. Let one call take both inputs, or let module=... name a part that is called once"
            )
        self._has_called, self.context = True, Settings()
        self._said.put((None, (args, kwargs)))
        del args, kwargs
        answer = self._heard.get()
        if answer is GeneratorExit:  # unwinds the code; a user's ``except Exception`` does not stop it
            raise GeneratorExit
        return answer

    def _work(self) -> None:
        self._heard.get()
        current.set(self)
        try:
            kind_of(self._device).make_current(self._device)
            with self.context.restored():
                result = self._run()
        except GeneratorExit:
            return
        except BaseException as error:  # the caller's thread raises it
            self._said.put((error, None))
        else:
            self._said.put((None, result))


current: ContextVar[PausedCall | None] = ContextVar("current", default=None)
"""The paused call that runs in this thread, or None."""


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """Settings of a pipeline."""

    micro_batches: int = 8
    schedule: PipelineScheduleName = "1f1b"
    recompute: RecomputeMode = "rotor"  # see partition.Problem
    balance: Literal["auto"] | Sequence[int] = "auto"  # or how many stages of the chain each pipeline stage gets
    stages_per_device: int = 1  # more than one for "interleaved" only
    deferred_batch_norm: bool = False  # running statistics are updated once for each batch

    def __post_init__(self) -> None:
        check_numbers(self.schedule, 1, self.micro_batches, 1)
        check_recompute(self.recompute)
        if isinstance(self.balance, str) and self.balance != "auto":
            raise PipelineError(f'balance is {self.balance!r}: expected "auto" or numbers such as [3, 4, 2]')


class PipelinedModule:
    """Runs a module as a pipeline, in the place of its ``forward``."""

    active = True  # a copy has False
    caller = "training_step"  # what messages call the user's code around it

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        placement: Placement,
        runner: PipelineRunner,
        evaluation: PipelineRunner,
    ) -> None:
        self._model, self.module, self.placement = model, module, placement
        self.runner, self._evaluation = runner, evaluation
        self.partition, self.processes = runner.partition, runner.processes
        self._seed = first(torch.initial_seed(), self.processes.group)
        self._evaluations = 0

    # A copy of a live module computes with its own weights, plainly.
    def __reduce__(self) -> tuple[Any, ...]:
        return inactive, ()

    def start(self) -> None:
        """Replace the module's forward, and keep this process's part of the weights."""
        self.placement.give_up()
        attach(self.module, self)

    def stop(self, *, values: bool = True) -> None:
        """Undo :meth:`start`, with all weights as they are now or, after an error, with the local ones."""
        detach(self.module)
        self.runner.release()
        self.placement.restore(values=values)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In a training step, wait for the pipeline; without gradients, run forward."""
        if (paused := current.get()) is not None:
            return paused(module, args, kwargs)
        if not torch.is_grad_enabled():
            return self.evaluate(args, kwargs)
        raise PipelineError(
            f"{type(module).__name__} is cut into pipeline stages and was called with gradients outside of "
            f"{self.caller}: expected calls in {self.caller}, or under torch.no_grad()"
        )

    def sizes(self, batch: Any) -> tuple[int, ...]:
        """Rows of each micro-batch of a batch."""
        return sizes_of(rows_in(batch), self.partition.problem.micro_batches)

    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's output for a whole batch, on every process, without gradients."""
        runner = self.runner if self.module.training else self._evaluation
        sizes = self.sizes((args, kwargs))
        self._evaluations += 1
        seed = mixed(mixed(self._seed, 0), self._evaluations)  # for dropout that is on without gradients
        return join(runner.run(runner.inputs(split((args, kwargs), sizes)), None, seed=seed)[0], sizes)

    def train(
        self, run: Callable[..., Any], batch: Any, *, number: int, scale: float = 1.0
    ) -> tuple[list[Any], torch.Tensor]:
        """Results by micro-batch and the batch's loss; gradients of the scaled loss are added to existing ones.

        ``run`` is user code that calls the module once. Every process runs all of it, so gradients outside are alike.
        """
        sizes = self.sizes(batch)
        outside_learns = any(tensor.requires_grad for tensor in outside(self._model, self.module))
        seed = mixed(self._seed, number)
        calls = [
            PausedCall(partial(run, part), place, self.processes.device, seed=seed, what=self.caller)
            for place, part in enumerate(split(batch, sizes))
        ]
        results: dict[int, Any] = {}

        def loss(output: Any, place: int) -> torch.Tensor:
            results[place] = calls[place].resume(output)
            return self._loss_of(results[place]) * (scale * sizes[place] / sum(sizes))

        try:
            inputs = self.runner.inputs([call.start() for call in calls])
            outputs, gradients = self.runner.run(inputs, loss, seed=seed, context=calls[0].context)
            for place, output in enumerate(outputs):
                if place in results:
                    continue
                if outside_learns:  # detached tensors ask for gradients as the output does
                    output = tree_map_only(
                        torch.Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), output
                    )
                value = loss(output, place)
                if outside_learns and value.requires_grad:
                    value.backward()
        finally:
            for call in calls:
                call.abandon()
        run_backward(tensors_in(inputs), chain.from_iterable(gradients))
        made = [results[place] for place in range(len(calls))]
        losses = [
            self._loss_of(result).detach() * (size / sum(sizes)) for result, size in zip(made, sizes, strict=True)
        ]
        return made, torch.stack(losses).sum()

    def _loss_of(self, result: Any) -> torch.Tensor:
        """The loss in what user code returned."""
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if not isinstance(loss, torch.Tensor):
            raise PipelineError(
                f"{self.caller} returned {type(result).__name__} without a loss: expected a tensor, or a dict with a "
                "tensor under 'loss'"
            )
        return loss
