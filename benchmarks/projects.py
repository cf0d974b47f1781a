"""Programs of other packages, trained plainly, with room, at 70 % of what can be saved, and at the least limit.

    python -m benchmarks.projects                 # all that have no result yet; writes benchmarks/results/projects.md
    python -m benchmarks.projects --only gat_cora # some of them, again
    python -m benchmarks.projects --report        # the table alone
    python -m benchmarks.projects --quick         # 70 % alone; a run without it goes on from there
    python -m benchmarks.projects --list          # names

``make projects`` makes an environment with the packages first. The programs are in ``benchmarks/project_programs``: modules and recipes of their
packages, with random weights and random data. Nothing is done for lightning-rotor: no ``module=``, no change to a model. Each program runs in a
process of its own, with one thread, and leaves one line in ``benchmarks/results/projects.jsonl``. Its trainings, each from the same seed:

    plain    without the callback; counts the FLOPs of its second step's forward, and takes the peaks of its last ones
    least    at 10 KiB, which ends in an error that names the least limit; then at that limit
    room     at a limit at which nothing has to be recomputed
    70 %     at the peak with room, less 70 % of what is between the plain peak and the least limit

Weights, buffers, losses, the optimizer's state and the random generators at the end are compared bit for bit with those of plain training.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import pickle
import platform
import random
import resource
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.models import commit
from benchmarks.project_programs.program import PROGRAMS, STEPS, Program, Run
from lightning_rotor import RotorCallback
from lightning_rotor.errors import RotorError
from lightning_rotor.memory.resident_memory import allocated_bytes
from lightning_rotor.private.values import tensors_in
from lightning_rotor.profiling import StepMeter
from lightning_rotor.units import format_bytes

RESULTS = Path(__file__).parent / "results"
LOG, TABLE = RESULTS / "projects.jsonl", RESULTS / "projects.md"
FILES = ("forecasting", "generation", "graphs", "language", "science", "speech", "vision")
ROOM, TOO_LITTLE = "1TiB", "10KiB"
COUNTED = 1  # the step whose FLOPs are counted
TIMED = slice(4, 7)  # plans have settled, and the callback's sample of the eighth step has not come
METERED = 8  # from this step on the benchmark measures; before, torch's one profiler is the callback's
FROM_THE_START = 1  # where there is no callback
TRIES = 3  # limits at 70 %, where sizes are draws and a later step names a larger minimum
SAVED = 0.7
ENOUGH = 0.9


# ---------------------------------------------------------------------------------------- What is seen of a training.


class Observer(L.Callback):
    """Seconds, peaks and losses of each step.

    It stands before the RotorCallback, and ends a step where the next one begins. So the plan does not have to count with a hook at the end of
    steps that may allocate anything.
    """

    def __init__(self, compute: Compute | None = None, metered: int = METERED) -> None:
        self.losses: list[torch.Tensor] = []
        self.seconds: list[float] = []
        self.peaks: dict[int, int] = {}  # by the benchmark's own meter
        self.followed: dict[int, int] = {}  # by the callback's
        self.planned: list[str] = []
        self.bits: dict[str, str] = {}
        self.rotor: RotorCallback | None = None
        self._compute = compute
        self._metered = metered
        self._step = -1
        self._meter: StepMeter | None = None
        self._base = 0
        self.resident_bytes = 0  # of model, gradients, optimizer and batch, when a step begins
        self._began = 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> Observer:
        """Itself: neuralforecast trains a copy of a model and its callbacks."""
        return self

    def on_train_batch_start(self, trainer: L.Trainer, model: L.LightningModule, batch: Any, batch_idx: int) -> None:
        """End a step, and begin with the next one."""
        self._end()
        self._step += 1
        self.rotor = next((each for each in trainer.callbacks if isinstance(each, RotorCallback)), None)
        if self._step == COUNTED and self._compute is not None:
            self._compute.begin(model)
        if self._step >= self._metered and not self._is_callbacks_turn:
            self._meter = StepMeter(model.device)
            self._meter.start()
            self._base = allocated_bytes(model, trainer.optimizers, tensors_in(batch), model.device)
            self.resident_bytes = max(self.resident_bytes, self._base)
        self._began = time.process_time()

    def on_before_backward(self, trainer: L.Trainer, model: L.LightningModule, loss: torch.Tensor) -> None:
        """Note a loss."""
        self.losses.append(loss.detach().clone())

    def on_train_end(self, trainer: L.Trainer, model: L.LightningModule) -> None:
        """Note what training has led to."""
        self._end()
        if self.rotor is not None and self.rotor._planner is not None:
            self.planned = [module.target.name for module in self.rotor._planner.modules]
        states = [optimizer.state_dict()["state"] for optimizer in trainer.optimizers]
        generators = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1]]  # noqa: NPY002
        self.bits = {"losses": digest(self.losses), "optimizer": digest(states), "generators": digest(generators)}
        self.bits |= {f"weights {name}": digest(tensor) for name, tensor in model.state_dict().items()}
        self.bits |= {f"buffer {name}": digest(buffer) for name, buffer in model.named_buffers()}

    def _end(self) -> None:
        if self._step < 0:
            return
        self.seconds.append(time.process_time() - self._began)
        if self._compute is not None:
            self._compute.end()
        if self._meter is not None:
            peak = self._base + self._meter.stop().peak_bytes
            # The first one does not see gradients go that nobody saw come. And a new size that comes while the benchmark
            # has torch's profiler cannot be measured by the callback, which runs it plainly and says so.
            if self._step > self._metered and not self._has_disturbed:
                self.peaks[self._step] = peak
        elif self.rotor is not None and self._step > 0 and self.rotor.measured_peak_bytes is not None:
            self.followed[self._step] = self.rotor.measured_peak_bytes
        self._meter = None

    @property
    def _is_callbacks_turn(self) -> bool:
        """True if the callback measures the step that begins, or would have to: it needs torch's profiler."""
        if self.rotor is None or self.rotor._planner is None:
            return False
        return self.rotor._planner.watch.due or self._has_disturbed

    @property
    def _has_disturbed(self) -> bool:
        """True if the callback has found torch's profiler taken when it had to measure a call."""
        return (
            self.rotor is not None
            and self.rotor._planner is not None
            and "profiler" in self.rotor._planner.loop.warned_of
        )

    @property
    def peak_bytes(self) -> int:
        """The highest peak from the second step on."""
        return max([*self.peaks.values(), *self.followed.values()])

    @property
    def of_a_step(self) -> float:
        """Processor seconds of a step in which nothing is measured or planned any more."""
        return median(self.seconds[TIMED])


def digest(value: Any) -> str:
    """A text that two values share if they are equal to the bit."""
    known = hashlib.sha256()
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            leaf = leaf.detach().contiguous()
            known.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            known.update(leaf.reshape(-1).view(torch.uint8).numpy().tobytes() if leaf.numel() else b"")
        elif isinstance(leaf, np.ndarray):
            known.update(leaf.tobytes())
        else:
            known.update(pickle.dumps(leaf))
    return known.hexdigest()[:16]


class Compute(TorchDispatchMode):
    """FLOPs of a step's forward as far as gradients flow, by the modules that are running: those of torch's registry, else one an element."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[frozenset[str]] = Counter()
        self._running: list[str] = []
        self._model: nn.Module | None = None

    def begin(self, model: nn.Module) -> None:
        """Count from now on."""
        self._model = model
        for name, module in model.named_modules():
            # Not hooks: those do not fire when a forward is called by its name.
            module.__dict__["forward"] = partial(self._call, name, module.forward)
        self.__enter__()

    def end(self) -> None:
        """Count no more."""
        if self._model is None:
            return
        self.__exit__(None, None, None)
        for module in self._model.modules():
            del module.__dict__["forward"]
        self._model = None

    def planned(self, names: list[str]) -> float:
        """The share of the FLOPs in the forwards of these modules."""
        inside = sum(flops for running, flops in self.flops.items() if not running.isdisjoint(names))
        return inside / max(sum(self.flops.values()), 1)

    def _call(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = self.flops.copy()
        self._running.append(name)
        try:
            output = forward(*args, **kwargs)
        finally:
            self._running.pop()
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        if tensors and not any(tensor.requires_grad for tensor in tensors):
            self.flops = before  # frozen: it keeps nothing for a backward
        return output

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1 and not func.is_view:
            self.flops[frozenset(self._running)] += flops_of(func, args, kwargs, result)
        return result


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """FLOPs of an operation."""
    packet = func.overloadpacket
    name = packet.__name__
    if name.startswith("_scaled_dot_product"):  # the registry has the kernels of GPUs only
        query, key, value = args[:3]
        return int(2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1]))
    if name == "mkldnn_rnn_layer":
        return int(2 * args[0].shape[:2].numel() * sum(weight.numel() for weight in args[1:5]))
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    return sum(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))


# ---------------------------------------------------------------------------------------- One program, four ways.


def train(
    program: Program, rotor: RotorCallback | None = None, compute: Compute | None = None, metered: int = METERED
) -> Observer:
    """Train once, from the seed."""
    L.seed_everything(0, verbose=False)
    observer = Observer(compute, metered)
    program.train(Run([observer, *([] if rotor is None else [rotor])]))
    if len(observer.seconds) < STEPS:
        raise RuntimeError(f"it trained {len(observer.seconds)} steps of {STEPS}")
    return observer


def with_limit(program: Program, limit: int | str, plain: Observer) -> tuple[dict[str, Any], Observer | None]:
    """Train within a limit, and compare with plain training."""
    rotor = RotorCallback(limit, show_table=False)
    began = time.perf_counter()
    try:
        seen = train(program, rotor)
    except RotorError as error:
        first_line = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return {"error": first_line, "typed": True, "minimum": getattr(error, "minimum_bytes", None)}, None
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}"
        print(traceback.format_exc(), file=sys.stderr)
        return {"error": f"{type(error).__name__}: {error}".split("\n")[0][:300] + f" ({place})", "typed": False}, None
    differences = [name for name in sorted({*plain.bits, *seen.bits}) if plain.bits.get(name) != seen.bits.get(name)]
    found = {
        "seconds": round(time.perf_counter() - began, 1),
        "peak": seen.peak_bytes,
        "peaks": {"followed": list(seen.followed.values()), "measured": list(seen.peaks.values())},
        "differences": differences[:5],
        "planned": seen.planned,
        "recomputed": None if seen.rotor is None or seen.rotor.plan is None else seen.rotor.plan.overhead,
        "first": seen.seconds[0],
        "first_ratio": seen.seconds[0] / plain.of_a_step,
        "later": seen.of_a_step / plain.of_a_step,
    }
    if not isinstance(limit, str):
        found |= {"limit": limit, "kept": seen.peak_bytes <= limit}
    return found, seen


def measure(program: Program, *, quick: bool) -> Iterator[dict[str, Any]]:
    """Train a program in all ways. What is known after each of them, as the next one may take too long, or end the process."""
    compute = Compute()
    found: dict[str, Any] = {"name": program.name, "package": program.package, "says": program.says}
    found["version"] = version(program.package)
    yield found | {"failed": "in plain training"}
    plain = train(program, None, compute, FROM_THE_START)
    again = train(program)
    found |= {"plain_peak": max(plain.peaks.values()), "resident": plain.resident_bytes}
    found["repeats"] = [name for name in plain.bits if plain.bits[name] != again.bits[name]][:5]
    plain.seconds = again.seconds  # in which nothing is measured
    found["plain_step"] = plain.of_a_step
    yield found | {"failed": f"at {TOO_LITTLE}"}
    began = time.perf_counter()
    said, _ = with_limit(program, TOO_LITTLE, plain)
    found["too_little"] = said | {"seconds": round(time.perf_counter() - began, 1)}
    room = None
    if not quick:
        yield found | {"failed": "with room"}
        found["room"], room = with_limit(program, ROOM, plain)
        found["share"] = compute.planned(found["room"].get("planned", []))
    least = said.get("minimum")
    if least is not None:
        saved = max(found["plain_peak"] - least, 0)
        found |= {"least_bytes": least, "saved": saved}
        top = room.peak_bytes if room is not None else found["plain_peak"]
        for _ in range(TRIES):
            if not saved:
                break
            yield found | {"failed": f"at {SAVED:.0%}"}
            found["middle"], _ = with_limit(program, int(top - SAVED * saved), plain)
            larger = found["middle"].get("minimum")
            if larger is None or larger <= least:
                break
            # A later step was larger than those that the first error knew.
            least = larger
            saved = max(found["plain_peak"] - least, 0)
            found |= {"least_bytes": least, "saved": saved, "larger": found["middle"]["error"]}
            if not saved:
                del found["middle"]
        if quick:
            found |= {"quick": True, "share": compute.planned(found.get("middle", {}).get("planned", []))}
        elif saved:
            yield found | {"failed": "at the least limit"}
            found["least"], _ = with_limit(program, least, plain)
    yield found


# ---------------------------------------------------------------------------------------- The log and the table.


def faults(row: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    found = [f"**failed** {row['failed']}"] if "failed" in row else []
    for way in WAYS:
        run = row.get(way)
        if run is None:
            continue
        if "error" in run:
            found.append(f"{way}: {run['error']}" if run["typed"] else f"{way}: **crash**: {run['error']}")
            continue
        if run["differences"] and not row["repeats"]:
            found.append(f"{way}: **other bits**: {', '.join(run['differences'])}")
        if not run.get("kept", True):
            found.append(f"{way}: **{format_bytes(run['peak'] - run['limit'])} over the limit**")
    said = row.get("too_little")
    if said is not None and not said.get("typed", False):
        found.append(f"{TOO_LITTLE}: **{said.get('error', f'no error in {STEPS} steps')}**")
    return found


WAYS = {"room": "room", "middle": "70 %", "least": "least"}


def rows_of(log: Path) -> dict[str, dict[str, Any]]:
    """The last line of each program."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return {row["name"]: row for row in map(json.loads, lines)}


def answer(row: dict[str, Any], say: Callable[[dict[str, Any]], str]) -> str:
    """A cell about the trainings with room, at 70 % and at the least limit."""
    runs = [row.get(way) for way in WAYS]
    if all(runs) and all("error" not in run for run in runs if run) and len({say(run) for run in runs if run}) == 1:
        return say(runs[0])  # type: ignore[arg-type]
    return " / ".join("–" if run is None else say(run) for run in runs)


def same(run: dict[str, Any]) -> str:
    """True if bits are those of plain training, as text."""
    return "error" if "error" in run else "**no**" if run["differences"] else "yes"


def kept(run: dict[str, Any]) -> str:
    """True if no step from the second on has exceeded the limit, as text."""
    return "error" if "error" in run else "yes" if run.get("kept", True) else "**no**"


def times(run: dict[str, Any], key: str) -> str:
    """A ratio to a plain step."""
    return "–" if "error" in run else f"{run[key]:.2f}" if run[key] < 10 else f"{run[key]:.0f}"


def summary(rows: list[dict[str, Any]]) -> str:
    """All of it in two sentences."""
    runs = [(row, run) for row in rows for way in WAYS if (run := row.get(way)) is not None]
    done = [(row, run) for row, run in runs if "error" not in run]
    different = sum(bool(run["differences"]) and not row["repeats"] for row, run in done)
    over = sum(not run.get("kept", True) for _, run in done)
    over += sum("error" not in row.get("too_little", {"error": ""}) for row in rows)
    typed = sum(run["typed"] for _, run in runs if "error" in run)
    crashed = sum(not run["typed"] for _, run in runs if "error" in run) + sum("failed" in row for row in rows)
    enough = sum(row.get("share", 0) >= ENOUGH for row in rows)
    return (
        f"**{len(rows)} programs of {len({row['package'] for row in rows})} packages**, {len(runs)} trainings with a limit: "
        f"{different} silent differences, {over} silently over the limit from the second step on, {typed} typed errors, "
        f"{crashed} other failures. At least 90 % of the compute is planned in {enough} of {len(rows)}."
    )


def markdown(rows: dict[str, dict[str, Any]]) -> str:
    """The table, and what is not as it should be."""
    chosen = [rows[name] for name in PROGRAMS if name in rows]
    lines = [
        "# Programs of other packages",
        "",
        summary(chosen),
        "",
        f"`make projects`, that is `python -m benchmarks.projects`. Python {platform.python_version()}, torch {torch.__version__}, lightning "
        f"{version('lightning')}, {platform.machine()}, one",
        f"thread on a machine that others use, {STEPS} steps. Cells with slashes are of three limits: room for everything / 70 % of what can be",
        "saved / the least limit that the error for a smaller one names. *Planned*: share of the FLOPs of the forward, as far as gradients flow, in",
        "planned modules. *Limit kept*: peaks of steps from the second one on, by the callback's meter and the benchmark's own. *Same bits*:",
        "weights, buffers, losses, optimizer state and random generators equal those of plain training. *First batch*, *later step*: processor",
        "time in plain steps. A dash: not tried yet. `projects.jsonl` has the figures, and which commit each row is of.",
        "",
        "| program | package | plain peak | least | planned | limit kept | same bits | first batch | its seconds | later step |",
        "|---|---|---:|---:|---:|---|---|---:|---:|---:|",
    ]
    for row in chosen:
        start = f"| {row['name']} | {row['package']} {row.get('version', '')} |"
        if not any(way in row for way in WAYS):
            if "failed" in row or "least_bytes" not in row:
                lines.append(f"{start} {row.get('failed', f'**no error at {TOO_LITTLE}**')} | | | | | | | |")
            else:
                peak, least = format_bytes(row["plain_peak"]), format_bytes(row["least_bytes"])
                lines.append(f"{start} {peak} | {least} | nothing can be saved, see below | | | | | |")
            continue
        least = row.get("least_bytes")
        first = row.get("room") or row.get("middle") or row["least"]
        lines.append(
            f"{start} {format_bytes(row['plain_peak'])} | {'–' if least is None else format_bytes(least)} | "
            f"{row.get('share', 0):.0%} | {answer(row, kept)} | {answer(row, same)} | {times(first, 'first_ratio')} | "
            f"{times(first, 'first')} | {answer(row, partial(times, key='later'))} |"
        )
    lines += ["", "## The recipes", ""]
    lines += [f"- `{row['name']}`: {row['says']}" for row in chosen if "says" in row]
    lines += nothing_saved(chosen)
    told = [(row["name"], fault) for row in chosen for fault in faults(row)]
    lines += ["", "## Errors and faults", "", *(f"- `{name}`: {fault}" for name, fault in told)] if told else []
    restless = [row["name"] for row in chosen if row.get("repeats")]
    lines += ["", f"Plain training does not repeat to the bit: {', '.join(restless)}."] if restless else []
    return "\n".join(lines) + "\n"


def nothing_saved(rows: list[dict[str, Any]]) -> list[str]:
    """Why nothing can be saved, with bytes, of the programs of which that is so."""
    lines = []
    for row in rows:
        if "failed" in row or "least_bytes" not in row or any(way in row for way in WAYS):
            continue
        peak, resident = row["plain_peak"], row.get("resident")
        there = ""
        if resident is not None:
            there = (
                f" {format_bytes(resident)} of {format_bytes(peak)} are there when a step begins (parameters, gradients, the "
                "optimizer's state, the batch)."
            )
        when, error = f"at {TOO_LITTLE}", row["too_little"]["error"]
        if "larger" in row:
            when, error = f"of a later, larger step at {SAVED:.0%}", row["larger"]
        needs = error.partition("for this model and batch: ")[2].partition(". ")[0]
        lines.append(f"- `{row['name']}`:{there} The error {when} says: {needs}.")
    return ["", "## Where nothing can be saved", "", *lines] if lines else []


def run(name: str, limit: float, *, quick: bool) -> dict[str, Any]:
    """Train a program in a process of its own, and return its line."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    environment |= {"TOKENIZERS_PARALLELISM": "false", "YOLO_OFFLINE": "true"}
    command = [sys.executable, "-m", "benchmarks.projects", "--one", name, *(["--quick"] if quick else [])]
    began = time.perf_counter()
    # Of the processor, as others may have the machine; and some more by the clock, as a process may wait.
    bounded = partial(resource.setrlimit, resource.RLIMIT_CPU, (round(limit), round(limit) + 1))
    how: dict[str, Any] = {"capture_output": True, "text": True, "env": environment}
    try:
        done = subprocess.run(command, check=False, timeout=6 * limit, preexec_fn=bounded, **how)
    except subprocess.TimeoutExpired as error:
        printed, reason = error.stdout or b"", f"longer than {6 * limit:.0f} s for all"
        found = last_row(printed.decode() if isinstance(printed, bytes) else printed)
    else:
        print(done.stderr[-3000:], file=sys.stderr)
        found = last_row(done.stdout)
        reason = f"exit status {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1][:300]}"
        if done.returncode == -signal.SIGXCPU:
            reason = f"longer than {limit:.0f} s of processor time for all"
    if "failed" in found:
        found["failed"] += f": {reason}"
    return found | {"commit": commit(), "took": round(time.perf_counter() - began)}


def last_row(printed: str) -> dict[str, Any]:
    """The last row in what a process has printed."""
    rows = [line for line in printed.splitlines() if line.startswith('{"name"') and line.endswith("}")]
    return json.loads(rows[-1])


def names(only: list[str], log: Path, *, quick: bool) -> Iterator[str]:
    """Programs to run now: those asked for, or those without a line that says all that is asked for."""
    known = {name for name, row in rows_of(log).items() if quick or not row.get("quick")}
    yield from (name for name in PROGRAMS if name in only or (not only and name not in known))


def main() -> None:
    """Run what is asked for, and write the table after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="programs to run, also if there is a result"
    )
    parser.add_argument("--report", action="store_true", help="write the table, and run nothing")
    parser.add_argument("--list", action="store_true", help="print names")
    parser.add_argument("--limit", type=float, default=300, help="seconds of processor time for one program")
    parser.add_argument("--log", type=Path, default=LOG, help="where results are kept, one line each")
    parser.add_argument("--quick", action="store_true", help="train at 70 %% alone; the rest is left for a later run")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for file in FILES:
        import_module(f"benchmarks.project_programs.{file}")
    if options.one:
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
        torch.set_num_threads(1)
        for found in measure(PROGRAMS[options.one], quick=options.quick):
            print(json.dumps(found), flush=True)
        return
    if options.list:
        print(*(f"{each.name:32} {each.package:28} {each.says}" for each in PROGRAMS.values()), sep="\n")
        return
    if unknown := set(options.only) - set(PROGRAMS):
        parser.error(f"no such program: {', '.join(sorted(unknown))}")
    for name in [] if options.report else names(options.only, options.log, quick=options.quick):
        row = run(name, options.limit, quick=options.quick)
        print(
            f"{name}: {'; '.join(faults(row)) or 'good'} ({row.get('share', 0):.0%} planned, {row.get('took')} s)",
            flush=True,
        )
        with options.log.open("a", encoding="utf-8") as log:
            log.write(json.dumps(row) + "\n")
    if options.log == LOG:
        TABLE.write_text(markdown(rows_of(LOG)), encoding="utf-8")


if __name__ == "__main__":
    main()
