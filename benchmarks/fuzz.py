# ruff: noqa: D102, D103  (tables of small things whose names say what they are)
"""Random programs with and without the library: the same bits, or a typed error that leaves everything as it was.

    python -m benchmarks.fuzz --programs 10000 --seed 0 --log fuzz.jsonl --report benchmarks/results/fuzz.md
    python -m benchmarks.fuzz ... --resume            goes on where a run was cut
    python -m benchmarks.fuzz --only 17 --shrink      one program of seed 0, made simpler if it fails
    python -m benchmarks.fuzz --compiled aot_eager    planned modules are compiled as a whole
    python -m benchmarks.fuzz --text "Program(body=(linear, relu), limit=0.3)"

fuzz_programs.py, fuzz_kinds.py and fuzz_objects.py have the grammar. A program is trained twice from equal seeds, plainly and under a limit,
and everything that user code can see is written down in order: losses, gradients, weights, buffers, optimizer state, metrics, generators,
records of hooks, attributes, flags. Peaks of whole steps are compared with the limit, from the second step on. What measuring reads from the
clock is drawn from the seed, so that plans differ between programs and not between runs.
"""

from __future__ import annotations

import argparse
import copy
import gc
import hashlib
import itertools
import json
import logging
import multiprocessing
import operator
import os
import platform
import queue
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning.pytorch as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.data import DataLoader

from benchmarks.fuzz_objects import Prefetched
from benchmarks.fuzz_programs import (
    COMPILED,
    HOOKS,
    Net,
    Node,
    Program,
    UserError,
    batches,
    compiled,
    draw,
    legal,
    loader,
    parse,
)
from benchmarks.gloo_processes import Failure, Processes
from benchmarks.random_chains import random_schedule
from lightning_rotor import (
    BudgetError,
    Checkpointable,
    RotorCallback,
    RotorError,
    RotorWarning,
    Schedule,
    is_recomputing,
    simulate,
)
from lightning_rotor.capture.compiled import INSIDE
from lightning_rotor.chain import Chain
from lightning_rotor.memory.budget import Budget
from lightning_rotor.planning import Plan, minimum_budget, scheduled
from lightning_rotor.profiling import Profile, meters, segment_seconds, stage_seconds
from lightning_rotor.profiling.memory_recording import Recording
from lightning_rotor.profiling.meters import CpuMeter
from lightning_rotor.schedule import leaves
from lightning_rotor.strategies import RotorPipelineStrategy
from lightning_rotor.units import MemoryLimit

TIME_LIMIT = 600  # seconds of a program, on a machine that others use
PRECISIONS = {"bf16-mixed", "64-true", "bf16-true"}
ENOUGH = 8 * 2**30

# -------------------------------------------------------------------------------------------------------- what is seen

_WHILE_TRAINING = {"forward", "log", "_lightning_rotor", "_lightning_rotor_compiled", "_compiled_call_impl"}
_OWN = {"program", "note", "input", "net", "collected", "split", "changes"}  # what the fuzzer needs in a model
_OF_MODULES = {*vars(nn.Module()), *vars(L.LightningModule()), *_WHILE_TRAINING, *_OWN}


def plain(value: Any) -> Any:
    """A copy that ``==`` compares to the bit."""
    match value:
        case torch.Tensor() if value.layout == torch.sparse_coo:
            value = value.detach().coalesce()
            return tuple(value.shape), plain(value.indices()), plain(value.values())
        case torch.Tensor() if is_traceable_wrapper_subclass(value):
            return type(value).__name__, plain([getattr(value, name) for name in value.__tensor_flatten__()[0]])
        case torch.Tensor():
            bits = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            return str(value.dtype), tuple(value.shape), bits
        case torch.Generator():
            return plain(value.get_state())
        case random.Random():
            return hash(value.getstate())
        case dict():
            return tuple((key, plain(each)) for key, each in value.items())
        case list() | tuple():  # whose own methods may raise
            kind = list if isinstance(value, list) else tuple
            return tuple(map(plain, kind.__iter__(value)))
        case deque():
            return tuple(map(plain, value))
        case float():
            return repr(value)
        case int() | str() | bytes() | None:
            return value
        case _:
            own = getattr(value, "__dict__", None)
            known = type(value).__module__.startswith("benchmarks.fuzz")
            return type(value).__name__, plain(own) if own and known else ""


def close(left: Any, right: Any) -> bool:
    """Whether two such copies are equal up to rounding."""
    if isinstance(left, tuple) and len(left) == 3 and isinstance(left[2], bytes):
        if left == right or left[:2] != right[:2]:
            return left == right
        kind = getattr(torch, left[0].removeprefix("torch."))
        one, other = (torch.frombuffer(bytearray(each[2]), dtype=kind).double() for each in (left, right))
        tolerance = 0.05 if kind == torch.bfloat16 else 1e-5
        return torch.allclose(one, other, atol=tolerance, rtol=10 * tolerance)
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(close, left, right))
    return left == right


def digest(value: Any) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=12).hexdigest()


@dataclass
class Seen:
    """Of one run, in order.

    Attributes:
        events: What happened, and its value.
        marks: Digests of the parameters, and of the whole model, at moments between which an error may stop a step.
    """

    events: list[tuple[str, Any]] = field(default_factory=list)
    marks: set[str] = field(default_factory=set)
    optimizer_steps: int = 0
    net: Net | None = None
    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    remote: bool = False  # some of the model is on other processes
    marking: bool = True
    of_all: list[Any] = field(default_factory=list)  # notes of a hook on all modules
    loader: Any = None

    def watch(self, net: Net) -> None:
        self.net, self.modules = net, list(net.named_modules())
        self.note("mark")

    def note(self, label: str, value: Any = None) -> None:
        """Called by the program, too."""
        if is_recomputing() or self.net is None or self.remote:
            return
        if label == "mark":
            if self.marking:
                self.marks |= {digest(self.parameters()), digest(self.model())}
            return
        if label == "gradients":
            value = [parameter.grad for parameter in self.net.parameters()]
            self.optimizer_steps += 1
            self.note("mark")
        self.events.append((label, plain(value)))

    def parameters(self) -> Any:
        assert self.net is not None
        return [plain(parameter) for parameter in self.net.parameters()]

    def model(self) -> Any:
        """Weights, buffers, flags and attributes."""
        modules = {}
        for name, module in self.modules:
            values = {**module._parameters, **module._buffers}
            theirs = type(module).__module__.startswith("torch.nn.")
            own = {}
            for key, value in vars(module).items():
                # The compiler numbers what it has wrapped.
                if not (theirs or key in _OF_MODULES or key.startswith("_torchdynamo")):
                    own[key] = value
            flags = [module.training, *(each.requires_grad for each in module._parameters.values() if each is not None)]
            modules[name] = plain([values, own, flags])
        return modules

    def step_is_over(self, loss: Any, metrics: Any, optimizers: list[torch.optim.Optimizer]) -> None:
        assert self.net is not None
        if isinstance(self.loader, Prefetched):
            self.loader.settle()
        self.events += [("loss", plain(loss)), ("metrics", plain(metrics))]
        if self.remote:
            return
        host: Any = np.random.get_state()  # noqa: NPY002
        self.events += [
            ("generators", plain([torch.get_rng_state(), hash(random.getstate()), host[1].tobytes(), host[2:]])),
            ("model", self.model()),
            ("hook on all modules", plain(self.of_all)),
            ("optimizer", plain([each.state_dict() for each in optimizers])),
        ]
        if self.net.input is not None:
            self.note("input gradient", self.net.input.grad)
        self.note("mark")


# ------------------------------------------------------------------------------------------------------------- running


@dataclass
class Run:
    """What became of a program."""

    seen: Seen
    error: BaseException | None = None
    recomputed: int = 0
    inside: bool = False
    warnings: list[str] = field(default_factory=list)
    over: list[Over] = field(default_factory=list)
    limit_bytes: int = 0
    held_bytes: int = 0
    peak_bytes: int = 0
    trace: str = ""

    @property
    def runs_uncompiled(self) -> bool:
        """True if a plan has taken apart what was compiled, which then computes other numbers, as it says."""
        return any("was compiled as a whole, but a plan takes it apart" in each for each in self.warnings)


@dataclass
class Over:
    """A step behind the first one that took more than the limit, and what became of its plan."""

    step: int
    peak_bytes: int
    limit_bytes: int
    plan: Any
    answer: str = "none"  # another plan; or unknown, for no step followed

    def __str__(self) -> str:
        return f"step {self.step}: {self.peak_bytes} of {self.limit_bytes}, answer: {self.answer}"


def has_trainer(program: Program) -> bool:
    return program.way in ("callback", "pipeline") or program.has("ddp")


class Library:
    """How a program uses the library: the plain run has none.

    Args:
        program: What it is for.
        limit_bytes: The limit, where it is not to follow from what is measured.
    """

    def __init__(self, program: Program, limit_bytes: int | None = None) -> None:
        self.program, self.recomputed, self.callbacks = program, 0, []
        self.inside = False
        self.limit_bytes, self.wanted_bytes = limit_bytes, 0
        self.held_bytes = self.peak_bytes = 0  # of steps that were measured: before the lowest, and of the highest
        self.over: list[Over] = []
        self._plan: Any = None  # that the running step has gone through
        self._phases: Any = None  # of the step measured last

    def wrap(self, net: Net) -> None:
        if not has_trainer(self.program):
            net.body = Limited(net.body, self)
            if self.program.has("side"):
                net.side = Limited(net.side, self)

    def callback(self) -> list[L.Callback]:
        if self.program.way == "pipeline":
            return []
        self.callbacks.append(LimitedCallback(self))
        return self.callbacks[-1:]

    def look(self, net: Net) -> None:
        """Whether it recomputes."""
        plans = [net.body.plan] if isinstance(net.body, Limited) else [each.plan for each in self.callbacks]
        for plan in plans:
            if plan is not None:
                self.recomputed = max(self.recomputed, len(plan.recomputed))
                options = [
                    plan.chain.stages[leaf.stage].options[leaf.option]
                    for item in plan.schedule.items
                    for leaf in leaves(item)
                ]
                self.inside = self.inside or any(option.name == INSIDE for option in options)

    def note_plan(self) -> None:
        """Note the plan of a step that is past its forward: at its end there may be another one already."""
        self._plan = self.callbacks[-1]._planner.plan if self.callbacks else None

    def follow(self, number: int) -> None:
        """Compare the peak of a whole step with the limit, if it was measured."""
        if self.program.limit is None or not self.callbacks:
            return
        planner = self.callbacks[-1]._planner
        for each in self.over:
            if each.answer == "unknown" and number == each.step + 1:
                each.answer = "none" if do_the_same(self._plan, each.plan) else "another plan"
        watch, limit_bytes = planner.watch, planner.limit.size_bytes
        is_new = bool(watch.phases) and watch.phases is not self._phases and watch.is_exact
        self._phases = watch.phases
        if is_new:
            starts = [phase.start_bytes for phase in watch.phases]
            self.held_bytes = min([*starts, self.held_bytes or ENOUGH])
            self.peak_bytes = max(self.peak_bytes, watch.peak_bytes)
        # The first step of a training that was resumed has another number, and is a first one all the same.
        is_first = planner._steps_begun <= 1
        if is_new and not is_first and watch.peak_bytes > limit_bytes > 0:
            self.over.append(Over(number, watch.peak_bytes, limit_bytes, self._plan, "unknown"))

    def chosen(self, profile: Profile, budget: Budget, reserved_bytes: int = 0) -> int:
        """The limit."""
        self.wanted_bytes = self.wanted_bytes or min(self.budget(profile, budget) + reserved_bytes, ENOUGH)
        return self.limit_bytes or self.wanted_bytes

    def left_to_chance(self, budget: Budget) -> Budget:
        """Leave the planning to chance, if the program says so."""
        if self.program.limit is not None:
            return budget
        return Chance(**{each.name: getattr(budget, each.name) for each in fields(budget)}, seed=self.program.seed)

    def budget(self, profile: Profile, budget: Budget) -> int:
        """As far from the least to the most as the program says."""
        if self.program.limit is None or self.program.limit > 1:
            return ENOUGH
        most = simulate(profile.chain, Schedule.keep_all(len(profile.chain)), **budget.conditions).peak_bytes
        share = self.program.limit
        if COMPILED & {*self.program.features}:
            # Of one stage nothing can be recomputed, so that its least is its most. What a plan inside of it takes is
            # known later: an error names that.
            return int(_LEAST_OF_A_GRAPH * most + share * (1 - _LEAST_OF_A_GRAPH) * most)
        least = minimum_budget(profile.chain, **budget.conditions).peak_bytes
        return int(least + share * (most - least) if share >= 0 else least * (1 + share))


_LEAST_OF_A_GRAPH = 0.4


def do_the_same(plan: Any, other: Any) -> bool:
    """True if two plans run one schedule on the same sizes. A plan for several calls is made anew at each step."""
    if plan is None or other is None:
        return plan is other
    saved_bytes, others = ([stage.keep.saved_bytes for stage in each.chain] for each in (plan, other))
    return plan.schedule == other.schedule and saved_bytes == others


@dataclass(frozen=True, slots=True)
class Chance(Budget):
    """Plans a random schedule, whatever it takes; another one for every chain."""

    seed: int = 0

    def plan(self, chain: Chain, *, slots: int = 500) -> Plan:
        """That schedule."""
        chance = random.Random(f"{self.seed} {chain.fingerprint}")
        schedule = random_schedule(chance, chain, segment_probability=0.8)
        return scheduled(chain, schedule, slots=slots, **self.conditions)


class MarksAlone(Recording):
    """Measures no bytes, since torch's profiler takes most of the time. Good for schedules that do not look at bytes."""

    def __init__(self, **_: Any) -> None:
        super().__init__()


class Limited(Checkpointable):
    """Under a limit that follows from what was measured first."""

    def __init__(self, module: nn.Module, library: Library) -> None:
        super().__init__(module, show_progress=False)
        limit, whole = self._limit, self._limit.budget

        def budget(name: str, profile: Profile) -> Budget:
            if limit.limit is None:
                limit.limit = MemoryLimit(size_bytes=library.chosen(profile, Budget(ENOUGH)))
            return library.left_to_chance(whole(name, profile))

        limit.budget = budget


class LimitedCallback(RotorCallback):
    """Likewise."""

    def __init__(self, library: Library) -> None:
        has = library.program.has
        self.library = library
        named = "" if has("whole") else ["body", "side"] if has("side") else "body"
        # What was compiled as a whole runs as it is, and nothing asks for a budget before a limit is exceeded.
        limit = library.limit_bytes if COMPILED & {*library.program.features} else None
        super().__init__(limit or ENOUGH, None if has("unnamed") else named, show_table=False)

    def _attach(self, trainer: L.Trainer, model: L.LightningModule) -> None:
        super()._attach(trainer, model)
        planner, library, chosen = self._planner, self.library, []
        whole = planner.budget

        def budget(name: str, profile: Profile) -> Budget:
            allowed = whole(name, profile)
            if not chosen:
                chosen.append(library.chosen(profile, allowed, allowed.reserved_bytes))
                planner.limit._limit = MemoryLimit(size_bytes=chosen[0])
                allowed = whole(name, profile)
            return library.left_to_chance(allowed)

        planner.budget = budget


class Watcher(L.Callback):
    """Looks at the Trainer's steps, and does what programs do between them."""

    def __init__(self, seen: Seen, library: Library | None, folder: str) -> None:
        self.seen, self.library, self.folder = seen, library, folder

    def on_train_batch_start(self, trainer: L.Trainer, net: Net, batch: Any, batch_idx: int) -> None:
        before_step(net, batch_idx, self.seen)

    def on_after_backward(self, trainer: L.Trainer, net: Net) -> None:
        if self.library is not None:
            self.library.note_plan()

    def on_before_optimizer_step(self, trainer: L.Trainer, net: Net, optimizer: Any) -> None:
        if net.automatic_optimization:
            self.seen.note("gradients")

    def on_train_batch_end(self, trainer: L.Trainer, net: Net, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.seen.step_is_over(loss, dict(trainer.callback_metrics), trainer.optimizers)
        if self.library is not None:
            self.library.look(net)
            self.library.follow(batch_idx)
        after_step(net, batch_idx)
        if net.program.has("resume") and batch_idx == 0:
            trainer.save_checkpoint(f"{self.folder}/half.ckpt")

    def on_train_end(self, trainer: L.Trainer, net: Net) -> None:
        self.seen.events.append(("metrics", plain([dict(trainer.callback_metrics), dict(trainer.logged_metrics)])))


def before_step(net: Net, number: int, seen: Seen) -> None:
    """What programs do between steps."""
    if number == 1 and net.program.has("thaw"):
        net.body.requires_grad_(True)
    for change in net.changes:
        change(number)
    if number == 1 and net.program.has("late_hook"):
        leaf = next(each for name, each in seen.modules if name.startswith("body.") and not list(each.children()))
        leaf.register_forward_hook(HOOKS_LATER[net.program.seed % 2](net))
    seen.note("mark")


HOOKS_LATER = (
    lambda net: lambda module, x, y: y * 0.5 if isinstance(y, torch.Tensor) else None,
    lambda net: lambda module, x, y: net.records.append("late"),
)


def after_step(net: Net, number: int) -> None:
    """Likewise."""
    if net.program.has("edit_weights"):
        with torch.no_grad():
            for parameter in net.body.parameters():
                parameter.mul_(0.99)
    if net.program.has("copy") and number == 0:
        torch.manual_seed(0)
        net.history.append(copy.deepcopy(net.body).eval().state_dict())


def fit(
    program: Program, net: Net, seen: Seen, library: Library | None, folder: str, checkpoint: str | None = None
) -> None:
    """Under a Trainer."""
    precision = next(iter(PRECISIONS & {*program.features}), "32-true")
    options: dict[str, Any] = {"devices": 1}
    if program.way == "pipeline" and library is not None:
        schedule = "gpipe" if program.has("gpipe") else "interleaved" if program.has("interleaved") else "1f1b"
        mode = "always" if program.has("always") else "rotor"
        strategy = RotorPipelineStrategy("body", "auto", micro_batches(program), schedule, mode)
        options = {"strategy": strategy, "devices": 2}
    elif program.has("ddp"):
        strategy = DDPStrategy(find_unused_parameters=True)
        options = {"strategy": strategy, "devices": dist.get_world_size(), "use_distributed_sampler": False}
    elif program.way == "pipeline":
        net.split = micro_batches(program)
    trainer = L.Trainer(
        **options, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, default_root_dir=folder or None, precision=precision, detect_anomaly=program.has("anomaly"),
        accumulate_grad_batches=2 if program.has("accumulate") else 1, gradient_clip_val=0.5 if program.has("clip") else None,
        val_check_interval=1 if program.has("validation") else None, limit_val_batches=1 if program.has("validation") else 0,
        callbacks=[*([] if library is None else library.callback()), Watcher(seen, library, folder)],
    )  # fmt: skip
    data = batches(program)
    seen.loader = loader(program, data)
    training = seen.loader if isinstance(seen.loader, Prefetched) else DataLoader(data, batch_size=None)
    validation = DataLoader(data[:1], batch_size=None)
    trainer.fit(net, training, validation, ckpt_path=checkpoint, weights_only=False)


def micro_batches(program: Program) -> int:
    return 1 if program.has("gpipe") and not program.has("micro_batches") else 2


def loop(program: Program, net: Net, seen: Seen, library: Library | None, first: int = 0, state: Any = None) -> Any:
    """Without a Trainer."""
    if program.has("64-true", "bf16-true"):
        net.to(torch.float64 if program.has("64-true") else torch.bfloat16)
    optimizers = net.optimizers_of_a_loop()
    schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 1, 0.5)
    if state is not None:
        for optimizer, its_own in zip(optimizers, state, strict=True):
            optimizer.load_state_dict(its_own)
    seen.loader = loader(program, batches(program))
    every = 2 if program.has("accumulate") else 1
    for number, batch in enumerate(seen.loader):
        if number < first:
            continue
        before_step(net, number, seen)

        def backward(batch: torch.Tensor = batch, number: int = number) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16) if program.has("bf16-mixed") else nullcontext():
                loss = net.loss(batch, number)
            with torch.autograd.detect_anomaly(check_nan=False) if program.has("anomaly") else nullcontext():
                (loss / every).backward(retain_graph=program.has("retain"))
                if program.has("retain"):
                    loss.backward()
            return loss

        def closure() -> torch.Tensor:
            optimizers[0].zero_grad()
            loss = backward()
            seen.note("loss of a closure", loss)
            return loss

        loss = optimizers[0].step(closure) if program.has("lbfgs") else backward()
        if (number + 1) % every == 0 or number + 1 == program.steps:
            seen.note("gradients")
            if program.has("clip"):
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            for optimizer in [] if program.has("lbfgs") else optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            if program.has("schedule"):
                schedule.step()
        seen.step_is_over(loss, {}, optimizers)
        if library is not None:
            library.look(net)
        after_step(net, number)
        if program.has("validation"):
            net.eval()
            with torch.no_grad():
                net.validation_step(batch, number)
            net.train()
        if program.has("resume") and number == 0 and not first:
            return copy.deepcopy((net.state_dict(), [each.state_dict() for each in optimizers]))
    return None


def session(program: Program, seen: Seen, library: Library | None, folder: str) -> None:
    """One program from its start to its end."""
    net = Net(program, seen.note)
    seen.watch(net)
    if library is not None:
        library.wrap(net)
    train = has_trainer(program)
    first: Any = None
    with suppress(UserError):
        first = fit(program, net, seen, library, folder) if train else loop(program, net, seen, library)
    if program.has("error", "refit"):
        _ = fit(program, net, seen, library, folder) if train else loop(program, net, seen, library)
    if program.has("resume"):
        net = Net(program, seen.note)
        seen.watch(net)
        if library is not None:
            library.wrap(net)
        if train:
            fit(program, net, seen, library, folder, f"{folder}/half.ckpt")
        else:
            net.load_state_dict(first[0])
            loop(program, net, seen, library, 1, first[1])
    seen.remote = False
    left_behind = []
    for module in net.modules():
        for name, value in vars(module).items():
            # A compiled forward is the program's own.
            if name in _WHILE_TRAINING and not hasattr(value, "_torchdynamo_orig_callable"):
                left_behind.append(name)
    model = [] if program.way == "pipeline" else seen.model()
    seen.events.append(("end", plain([dict(net.state_dict()), left_behind, model])))


@contextmanager
def surroundings(program: Program, seen: Seen) -> Iterator[list[warnings.WarningMessage]]:
    """Equal seeds, a clock of the program's own, hooks on all modules, and what is warned of."""
    L.seed_everything(program.seed, verbose=False)
    if COMPILED & {*program.features}:
        torch._dynamo.reset()
    chance = random.Random(program.seed)
    ticks = itertools.accumulate(chance.choice([1, 2, 5, 10, 30]) * 1e-6 for _ in itertools.count())
    hooks = []
    if program.has("global_hook"):
        hooks.append(nn.modules.module.register_module_forward_hook(partial(_note_outputs, seen.of_all)))
    with warnings.catch_warnings(record=True) as caught, ExitStack() as patches:
        warnings.simplefilter("always")
        if program.way not in ("pipeline", "processes"):  # where processes meet, time goes by
            patches.enter_context(patch.object(CpuMeter, "now", lambda self: next(ticks)))
        if program.limit is None:
            patches.enter_context(patch.object(meters, "CpuRecording", MarksAlone))
        once = (
            (segment_seconds, "_ALL_BYTES", 0),
            (segment_seconds, "_ROUNDS", 2),
            (stage_seconds, "_ENOUGH_SECONDS", 1e-9),
        )
        for module, name, value in once:
            patches.enter_context(patch.object(module, name, value))
        try:
            yield caught
        finally:
            for hook in hooks:
                hook.remove()


def _note_outputs(notes: list[Any], module: nn.Module, x: Any, y: Any) -> None:
    if isinstance(module, (nn.Linear, nn.Conv2d)):
        notes.append(y.detach().float().sum())


def run(
    program: Program, *, with_library: bool, remote: bool = False, limit_bytes: int | None = None, closely: bool = False
) -> Run:
    """Train a program, within a limit that follows from what is measured if none is given.

    ``closely`` marks the model before and behind each call of a module.
    """
    done = Run(Seen(remote=remote, marking=not with_library))
    library = Library(program, limit_bytes) if with_library else None
    place = tempfile.TemporaryDirectory() if program.has("resume") else nullcontext("")
    with surroundings(program, done.seen) as caught, place as folder, ExitStack() as hooks:
        if closely:
            module = nn.modules.module
            for register in (module.register_module_forward_pre_hook, module.register_module_forward_hook):
                hooks.callback(register(lambda *_: done.seen.note("mark")).remove)
        try:
            session(program, done.seen, library, folder)
        except Exception as error:
            done.error, done.trace = error, "".join(traceback.format_exception(error)[-6:])
    done.warnings = [f"{each.category.__name__}: {each.message}" for each in caught]
    if library is not None:
        done.recomputed, done.inside = library.recomputed, library.inside
        said = any(each.category is RotorWarning and "more than mem_limit" in str(each.message) for each in caught)
        done.over = [] if said or done.error is not None else library.over
        done.limit_bytes = library.wanted_bytes
        done.held_bytes, done.peak_bytes = library.held_bytes, library.peak_bytes
    return done


# ------------------------------------------------------------------------------------------------------------- judging


@dataclass
class Verdict:
    """What two runs say about a program: ``equal``, ``refused`` and ``invalid`` (it fails in plain training, too) are good.

    So is ``uncompiled``: other numbers where a plan has taken apart what Inductor had compiled, and has said so.
    """

    kind: str
    reason: str = ""
    recomputed: int = 0
    inside: bool = False  # a compiled graph was planned inside
    steps_before: int = 0
    warnings: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    attempts: int = 1  # the second one within the minimum that the first named, and so on
    trace: str = ""

    @property
    def silently_over(self) -> bool:
        """True if a step took more than the limit, and nobody said or did anything."""
        return any("answer: none" in each for each in self.over)

    @property
    def failed(self) -> bool:
        return self.kind not in ("equal", "refused", "invalid", "uncompiled")


def judge(program: Program) -> Verdict:
    """Run a program both ways and compare."""
    if program.way == "pipeline":
        return judge_pipeline(program)
    if program.way == "processes":
        return judge_processes(program)
    if COMPILED & {*program.features} and program.way == "callback":
        return judge_compiled(program)
    verdict = within_a_limit(program, run(program, with_library=False))
    if verdict.kind != "refused and changed":
        return verdict
    # An error may stop a step in the middle of a forward. What plain training passes through there takes long to note.
    return within_a_limit(program, run(program, with_library=False, closely=True))


def judge_compiled(program: Program) -> Verdict:
    """With room for all, and then within a limit between what such a step begins with and its peak."""
    plainly = run(program, with_library=False)
    roomy = run(program, with_library=True, limit_bytes=ENOUGH)
    verdict = compared(plainly, roomy)
    if verdict.kind != "equal" or program.limit >= 1 or not roomy.peak_bytes:
        return with_notes(verdict, plainly, roomy)
    share = _LEAST_OF_A_GRAPH + (1 - _LEAST_OF_A_GRAPH) * program.limit
    limit_bytes = int(roomy.held_bytes + share * (roomy.peak_bytes - roomy.held_bytes))
    return within_a_limit(program, plainly, limit_bytes)


_MOST_ATTEMPTS = 3


def within_a_limit(
    program: Program, plainly: Run, limit_bytes: int | None = None, agreed: Callable[[int], int] = int
) -> Verdict:
    """Train within the limit; where it is refused, again within the minimum that the error names, which then is one."""
    for attempt in range(_MOST_ATTEMPTS):
        planned = run(program, with_library=True, limit_bytes=limit_bytes)
        verdict = compared(plainly, planned)
        is_named = verdict.kind == "refused" and isinstance(planned.error, BudgetError) and program.limit != -0.1
        limit_bytes = agreed(planned.error.minimum_bytes if is_named else 0)
        if not limit_bytes or attempt + 1 == _MOST_ATTEMPTS:
            break
    return replace(with_notes(verdict, plainly, planned), attempts=attempt + 1)


def with_notes(verdict: Verdict, plainly: Run, planned: Run) -> Verdict:
    """The verdict, with what else the second run has shown."""
    known = {each.split(": ")[0] + each[-30:] for each in plainly.warnings}
    new = {each[:110] for each in planned.warnings if each.split(": ")[0] + each[-30:] not in known}
    return replace(
        verdict,
        recomputed=planned.recomputed,
        inside=planned.inside,
        warnings=tuple(sorted(new)),
        over=tuple(map(str, planned.over)),
    )


def compared(plainly: Run, planned: Run) -> Verdict:
    """The verdict from two runs."""
    error, seen = planned.error, planned.seen
    difference = first_difference(plainly.seen.events, seen.events, whole=error is None)
    if difference and planned.runs_uncompiled and seen.net is not None and seen.net.program.has("inductor"):
        return Verdict("uncompiled", difference, trace=planned.trace)
    if isinstance(error, RotorError) and plainly.error is not None and not seen.optimizer_steps:
        return Verdict("invalid", short(str(error)))
    # A recomputation reads what its forward has read, so training may go on where autograd misses a value.
    beyond = plainly.error is not None and len(seen.events) > len(plainly.seen.events)
    if beyond and isinstance(error, (RotorError, type(plainly.error), type(None))):
        until = first_difference(plainly.seen.events, seen.events[: len(plainly.seen.events)], whole=True)
        if not until:
            return Verdict("invalid", short(f"{type(plainly.error).__name__}: {plainly.error}"))
    if isinstance(error, RotorError):
        reason = f"{type(error).__name__}: {short(str(error))}"
        known = plainly.seen.marks
        if difference:
            return Verdict("different before an error", f"{difference}; {reason}", trace=planned.trace)
        if digest(seen.parameters()) not in known:
            return Verdict("refused too late", reason, trace=planned.trace)
        if digest(seen.model()) not in known:
            return Verdict("refused and changed", reason, trace=planned.trace)
        return Verdict("refused", reason, steps_before=seen.optimizer_steps, trace=planned.trace)
    if plainly.error is not None:
        same = type(error) is type(plainly.error) and not difference
        reason = short(f"{type(plainly.error).__name__}: {plainly.error}; {error!r}")
        return Verdict("invalid" if same else "fails otherwise", reason, trace=planned.trace)
    if error is not None:
        return Verdict("crash", short(f"{type(error).__name__}: {error}"), trace=planned.trace)
    return Verdict("different", difference) if difference else Verdict("equal")


def first_difference(
    expected: list[tuple[str, Any]], found: list[tuple[str, Any]], *, whole: bool, same: Any = operator.eq
) -> str:
    """Where two runs part; empty if they do not."""
    for number, (left, right) in enumerate(zip(expected, found, strict=False)):
        if left[0] != right[0]:
            return f"event {number}: {left[0]} became {right[0]}"
        if not same(left[1], right[1]):
            return f"event {number}: {left[0]}{where(left[1], right[1])}"
    if (whole and len(expected) != len(found)) or len(found) > len(expected):
        return f"{len(found)} events for {len(expected)}"
    return ""


def where(left: Any, right: Any) -> str:
    """The path to the first difference inside of two values."""
    if isinstance(left, dict) and isinstance(right, dict):
        left, right = tuple(left.items()), tuple(right.items())
    if isinstance(left, tuple) and isinstance(right, tuple) and not (len(left) == 3 and isinstance(left[2], bytes)):
        if len(left) != len(right):
            return f" has {len(right)} for {len(left)}"
        for one, other in zip(left, right, strict=True):
            if one != other:
                named = isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str)
                return (f".{one[0]}" if named else "") + where(one, other)
    return "" if isinstance(left, tuple) else f" {left!r} became {right!r}"[:80]


def short(text: str) -> str:
    """An error's text without what differs from program to program."""
    words = ["#" if any(letter.isdigit() for letter in word) else word for word in text.split()]
    return " ".join(words)[:150]


# ----------------------------------------------------------------------------------------------------------- pipelines

_PROCESSES: list[Any] = []


def in_processes(job: Any, text: str) -> list[Any]:
    """What a function gives for a program in each of two processes."""
    if not _PROCESSES:
        _PROCESSES.append(Processes(2, preload=["benchmarks.fuzz"]))
    try:
        return _PROCESSES[0].run(2, job, text)
    except queue.Empty:
        _PROCESSES.pop().close()  # which wait for each other
        raise TimeoutError("two processes wait for each other") from None


def judge_pipeline(program: Program) -> Verdict:
    """On two processes, against one that runs the same micro-batches one after the other."""
    plainly = run(program, with_library=False)
    for found in in_processes(piped, repr(program)):
        if isinstance(found, Failure):
            return Verdict("crash", short(f"{found.kind}: {found.message}"), trace=found.text)
        events, kind, message, trace, typed = found
        if kind and typed and not any(label == "loss" for label, _ in events):
            return Verdict("refused", f"{kind}: {short(message)}", trace=trace)
        if kind and plainly.error is not None:
            return Verdict("invalid")
        expected = [event for event in plainly.seen.events if event[0] in ("loss", "metrics", "end")]
        same = close if micro_batches(program) > 1 else operator.eq
        if kind and typed and not first_difference(expected, events, whole=False, same=same):
            steps = sum(label == "loss" for label, _ in events)
            return Verdict("refused", f"{kind}: {short(message)}", steps_before=steps, trace=trace)
        if kind:
            return Verdict("crash", f"{kind}: {short(message)}", trace=trace)
        difference = first_difference(expected, events, whole=True, same=same)
        if difference:
            return Verdict("different", difference)
    return Verdict("equal", recomputed=int(program.has("always")))


def piped(rank: int, text: str) -> Any:
    """The run of one process."""
    done = run(parse(text), with_library=True, remote=True)
    error = done.error
    kind = "" if error is None else type(error).__name__
    return done.seen.events, kind, str(error), done.trace, isinstance(error, RotorError)


def judge_processes(program: Program) -> Verdict:
    """On two processes that exchange messages; each trains plainly, with room for all, and within a limit that is the same for both."""
    try:
        answers = in_processes(both_ways, repr(program))
    except TimeoutError as error:
        return Verdict("hang", str(error))
    for answer in answers:
        if isinstance(answer, Failure):
            return Verdict("crash", short(f"{answer.kind}: {answer.message}"), trace=answer.text)
    verdicts = [Verdict(**answer) for answer in answers]
    bad = [verdict for verdict in verdicts if verdict.failed]
    refused = [verdict for verdict in verdicts if verdict.kind == "refused"]
    return (bad or refused or verdicts)[0]


def both_ways(rank: int, text: str) -> dict[str, Any]:
    """The verdict of one process."""
    prepare()
    program = parse(text)
    plainly = run(program, with_library=False)
    planned = run(program, with_library=True, limit_bytes=ENOUGH)
    verdict = compared(plainly, planned)
    known: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(known, (verdict.kind, planned.limit_bytes))
    if any(kind != "equal" for kind, _ in known):
        return asdict(with_notes(verdict, plainly, planned))
    limit_bytes = max(limit for _, limit in known) or None
    return asdict(within_a_limit(program, plainly, limit_bytes, most_of_all))


def most_of_all(value: int) -> int:
    """The largest number of all processes."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, value)
    return max(told)


# ----------------------------------------------------------------------------------------------------------- shrinking


def smaller(program: Program) -> Iterator[Program]:
    """Programs that are a little simpler."""
    for feature in program.features:
        yield replace(program, features=tuple(each for each in program.features if each != feature))
    for body in _smaller_rows(program.body):
        if body:
            yield replace(program, body=body)
    simple = Program(program.body)
    for name in ("way", "style", "family", "limit", "width", "batch", "steps", "seed"):
        if getattr(program, name) != getattr(simple, name):
            yield legal(replace(program, **{name: getattr(simple, name)}))
    if program.steps > 1:
        yield replace(program, steps=program.steps - 1)


def _smaller_rows(row: tuple[Node, ...]) -> Iterator[tuple[Node, ...]]:
    for number, node in enumerate(row):
        before, after = row[:number], row[number + 1 :]
        yield before + after
        yield before + node.inner + after
        if node.kind not in HOOKS:
            yield from ((*before, Node(node.kind, inner), *after) for inner in _smaller_rows(node.inner) if inner)


def shrunk(program: Program, verdict: Verdict, seconds: float = 60) -> tuple[Program, Verdict]:
    """The simplest program found that fails in the same manner."""
    end = time.monotonic() + seconds
    tried = {program}
    progress = True
    while progress and time.monotonic() < end:
        progress = False
        for candidate in smaller(program):
            if candidate in tried or time.monotonic() > end:
                continue
            tried.add(candidate)
            found = judge(candidate)
            same = found.kind == verdict.kind and found.silently_over == verdict.silently_over
            if same and found.reason.split(":")[0] == verdict.reason.split(":")[0]:
                program, verdict, progress = candidate, found, True
                break
    return program, verdict


# ------------------------------------------------------------------------------------------------------------- workers


def prepare() -> None:
    """A process that is about to run many programs."""
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_rotor"):
        logging.getLogger(name).setLevel(logging.ERROR)
    gc.collect()
    gc.freeze()  # the library collects garbage, and imported modules are none


def drawn(seed: int, number: int, backend: str | None) -> Program:
    """The program of a number, compiled if there is a backend."""
    program = draw(seed, number)
    return program if backend is None else compiled(program, backend, number)


def work(pipe: Connection, seed: int, backend: str | None) -> None:
    """Judge the programs whose numbers come."""
    os.setpgrp()
    prepare()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # torch's profiler tells of blocks that it does not know
    while (number := pipe.recv()) is not None:
        started = time.monotonic()
        program = drawn(seed, number, backend)
        try:
            verdict = judge(program)
        except Exception as error:
            verdict = Verdict("fuzzer", repr(error), trace=traceback.format_exc())
        pipe.send(_result(number, program, time.monotonic() - started, verdict))
    for each in _PROCESSES:
        each.close()


def _result(number: int, program: Program, seconds: float, verdict: Verdict) -> dict[str, Any]:
    return {"number": number, "program": repr(program), "seconds": round(seconds, 2), **asdict(verdict)}


class Worker:
    """A process that judges one program at a time, and is replaced when it hangs or dies."""

    def __init__(self, seed: int, backend: str | None) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.fuzz"])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, seed, backend))
        self.process.start()
        theirs.close()
        self.number: int | None = None
        self.began, self.served = 0.0, 0

    def give(self, number: int | None) -> None:
        self.number, self.began = number, time.monotonic()
        self.served += 1
        self.pipe.send(number)

    def end(self) -> None:
        with suppress(OSError):
            self.pipe.send(None)
        self.process.join(5)
        self.kill()

    def kill(self) -> None:
        """With the processes of its pipelines."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def results(seed: int, numbers: Iterator[int], jobs: int, backend: str | None) -> Iterator[dict[str, Any]]:
    """Of all programs, as they come."""
    workers = [Worker(seed, backend) for _ in range(jobs)]
    while True:
        for place, worker in enumerate(workers):
            if worker.number is None:
                if worker.served >= 500:
                    worker.end()
                    worker = workers[place] = Worker(seed, backend)
                number = next(numbers, None)
                if number is not None:
                    worker.give(number)
        busy = [worker for worker in workers if worker.number is not None]
        if not busy:
            break
        ready = wait([worker.pipe for worker in busy], timeout=1)
        for worker in busy:
            late = time.monotonic() - worker.began > TIME_LIMIT
            if worker.pipe not in ready and not late:
                continue
            try:
                if worker.pipe not in ready:
                    raise TimeoutError
                yield worker.pipe.recv()
                worker.number = None
            except (EOFError, OSError) as error:
                verdict = Verdict("hang" if late else "death", repr(error))
                yield _result(
                    worker.number, drawn(seed, worker.number, backend), time.monotonic() - worker.began, verdict
                )
                worker.kill()
                workers[workers.index(worker)] = Worker(seed, backend)
    for worker in workers:
        worker.end()


# ------------------------------------------------------------------------------------------------------------- telling


def report(done: list[dict[str, Any]], seed: int, command: str) -> str:
    """The tables, in Markdown."""
    kinds = Counter(each["kind"] for each in done)
    failures = [each for each in done if Verdict(each["kind"]).failed]
    recomputing = sum(each["recomputed"] > 0 for each in done)
    named = sum(each["attempts"] > 1 for each in done)
    late = sum(each["kind"] == "refused" and each["steps_before"] > 0 for each in done)
    programs = [parse(each["program"]) for each in done]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    share = f"{kinds['refused'] / len(done):.1%}"
    lines = [
        "# Random programs with and without the library",
        "",
        f"`{command}` at {commit.strip()}, torch {torch.__version__}, lightning {L.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}, {os.cpu_count()} cores. Seed {seed}, numbers {done[0]['number']} to {done[-1]['number']}, "
        f"{sum(each['seconds'] for each in done) / 3600:.1f} hours of workers.",
        "",
        "| programs | equal to the bit | refused | failing in plain training, too | different |",
        "|---:|---:|---:|---:|---:|",
        f"| {len(done):,} | {kinds['equal']:,} | {kinds['refused']} ({share}) | {kinds['invalid']} | {len(failures)} |",
        "",
        f"{named} were refused at first, at a limit chosen too low; what is counted is training within the minimum that the error named.",
        "",
        f"{recomputing:,} of them ({recomputing / len(done):.0%}) recomputed something. {late} of the refused ones were refused in a later "
        "step, with the weights and attributes of plain training at that moment; the others before any weight had changed. Pipelines with several "
        "micro-batches are compared up to rounding.",
        "",
        "## Refused, by reason",
        "",
        "| programs | error |",
        "|---:|---|",
    ]
    reasons = Counter(each["reason"] for each in done if each["kind"] == "refused")
    lines += [f"| {count} | {reason.replace('|', '/')} |" for reason, count in reasons.most_common()]
    if failures:
        lines += ["", "## Different", "", "| number | what | program |", "|---:|---|---|"]
        lines += [f"| {each['number']} | {each['kind']}: {each['reason']} | `{each['program']}` |" for each in failures]
    lines += ["", "## What the programs were made of", "", "Share of programs with each, in percent."]
    tables = {
        "Settings": Counter(
            value for each in programs for value in (each.way, each.style, each.family, _limit_name(each.limit))
        ),
        "Layers": Counter(name for each in programs for name in each.kinds()),
        "Habits": Counter(name for each in programs for name in each.features),
    }
    for title, counts in tables.items():
        shares = ", ".join(f"{name} {100 * count / len(done):.1f}" for name, count in counts.most_common())
        lines += ["", f"**{title}:** {shares}"]
    foreign = Counter(warning for each in done for warning in {_head(text) for text in each["warnings"]})
    lines += ["", "## Warnings that plain training does not give", "", "| programs | warning |", "|---:|---|"]
    lines += [f"| {count} | {warning.replace('|', '/')} |" for warning, count in foreign.most_common(20)]
    over = [each for each in done if each["over"]]
    silent = [each for each in over if Verdict("equal", over=tuple(each["over"])).silently_over]
    lines += ["", "## Steps above the limit, of the second and later ones", ""]
    lines += [
        f"In {len(over)} programs, without an error or a warning; {len(silent)} of them went on under the same plan."
    ]
    if silent:
        lines += ["", "| number | what | program |", "|---:|---|---|"]
        lines += [f"| {each['number']} | {'; '.join(each['over'])} | `{each['program']}` |" for each in silent]
    return "\n".join([*lines, ""])


def _limit_name(limit: float | None) -> str:
    if limit is None:
        return "random schedules"
    named = {0.0: "least limit", 1.0: "limit of keeping all", 2.0: "no limit", -0.1: "limit below the least"}
    return named.get(limit, "limit between")


def _head(warning: str) -> str:
    return re.sub(r"'[^']*'|[0-9.]+", "#", warning)[:90]


def main() -> int:
    """Run programs, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", type=int, help="one program, by its number")
    parser.add_argument("--text", help="one program, by its text")
    parser.add_argument(
        "--shrink", action="store_true", help="find a simpler program that fails alike (with --only or --text)"
    )
    parser.add_argument(
        "--compiled", choices=sorted(COMPILED), help="compile the planned modules as a whole by this backend"
    )
    parser.add_argument("--skip", default="", help="programs with these kinds and features: append_hook,refit")
    parser.add_argument("--log", type=Path, default=Path("fuzz.jsonl"), help="a line for each program, as they come")
    parser.add_argument("--resume", action="store_true", help="go on where the log ends")
    parser.add_argument("--report", type=Path, help="where to write the tables")
    asked = parser.parse_args()
    if asked.only is not None or asked.text:
        prepare()
        program = parse(asked.text) if asked.text else drawn(asked.seed, asked.only, asked.compiled)
        verdict = judge(program)
        print(program, verdict, verdict.trace, sep="\n")
        if asked.shrink and (verdict.failed or verdict.silently_over):
            program, verdict = shrunk(program, verdict)
            print("shrunk to", program, verdict, verdict.trace, sep="\n")
        for each in _PROCESSES:
            each.close()
        return verdict.failed
    done = {}
    if asked.resume and asked.log.exists():
        logged = map(json.loads, asked.log.read_text(encoding="utf-8").splitlines())
        # What a process that hung or died says of its program may be the machine's fault.
        done = {each["number"]: each for each in logged if each["kind"] not in ("hang", "death", "fuzzer")}
    elif asked.log.exists():
        asked.log.unlink()
    numbers = iter([number for number in range(asked.first, asked.first + asked.programs) if number not in done])
    if asked.skip:
        skipped = set(asked.skip.split(","))
        numbers = (
            number
            for number in numbers
            if not skipped & {*(program := draw(asked.seed, number)).kinds(), *program.features, program.way}
        )
    started = time.monotonic()
    for result in results(asked.seed, numbers, asked.jobs, asked.compiled):
        done[result["number"]] = result
        with asked.log.open("a") as log:
            log.write(json.dumps(result) + "\n")
        if len(done) % 50 == 0 or Verdict(**{key: result[key] for key in ("kind",)}).failed:
            counts = Counter(each["kind"] for each in done.values())
            print(f"{time.monotonic() - started:.0f} s, {len(done)}: {dict(counts)}", flush=True)
    if asked.report is not None and done:
        ordered = sorted(done.values(), key=lambda each: each["number"])
        command = f"python -m benchmarks.fuzz {' '.join(sys.argv[1:])}"
        asked.report.write_text(report(ordered, asked.seed, command), encoding="utf-8")
        kept = [
            {key: each[key] for key in ("number", "kind", "reason", "recomputed")}
            for each in ordered
            if each["kind"] != "equal"
        ]
        asked.report.with_suffix(".json").write_text(
            json.dumps({"seed": asked.seed, "programs": len(ordered), "not equal": kept}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
