"""One limit for steps that call several modules: plain training against RotorCallback at three limits.

    python -m benchmarks.steps                    # writes benchmarks/results/steps.md
    python -m benchmarks.steps --models VAE       # prints the rows of one model

Peaks are the allocator's, of the second step and later. Weights and losses are compared bit for bit.
"""

from __future__ import annotations

import argparse
import logging
import platform
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader

from benchmarks.step_models import WORKLOADS, Workload
from lightning_rotor import BudgetError, RotorCallback
from lightning_rotor.memory.resident_memory import allocated_bytes
from lightning_rotor.private.values import tensors_in
from lightning_rotor.profiling import StepMeter
from lightning_rotor.units import format_bytes

RESULT = Path(__file__).parent / "results" / "steps.md"
STEPS = 12


class Peaks(L.Callback):
    """The allocator's peak of each step, measured where nothing else measures."""

    def __init__(self) -> None:
        self.peaks: list[int] = []
        self._meter: StepMeter | None = None
        self._base = 0

    def on_train_batch_start(self, trainer: L.Trainer, model: L.LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin with a step."""
        self._meter = StepMeter(model.device)
        self._meter.start()
        self._base = allocated_bytes(model, trainer.optimizers, tensors_in(batch), model.device)

    def on_train_batch_end(self, *_: Any) -> None:
        """End with a step."""
        assert self._meter is not None
        self.peaks.append(self._base + self._meter.stop().peak_bytes)


def train(workload: Workload, callbacks: list[L.Callback]) -> Any:
    """Train a fresh model on always the same batches."""
    L.seed_everything(0, verbose=False)
    model = workload.model()
    batches = [workload.model.batch() for _ in range(STEPS)]  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(num_workers|isinstance|never runs|beyond).*")
        L.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
        ).fit(model, DataLoader(batches, batch_size=None))  # fmt: skip
    return model


class Seconds(L.Callback):
    """Processor time of each step, which others on the machine change least."""

    def __init__(self) -> None:
        self._taken: list[float] = []

    @property
    def of_a_step(self) -> float:
        """The median of the second half, in which nothing is measured or planned any more."""
        return median(self._taken[len(self._taken) // 2 :])

    def on_train_batch_start(self, *_: Any) -> None:
        """Begin with a step."""
        self._began = time.thread_time()

    def on_train_batch_end(self, *_: Any) -> None:
        """End with a step."""
        self._taken.append(time.thread_time() - self._began)


class Followed(L.Callback):
    """What the callback measured in each step that it watched."""

    def __init__(self, rotor: RotorCallback) -> None:
        self._rotor = rotor
        self.peaks: list[int | None] = []

    def on_train_batch_end(self, *_: Any) -> None:
        """Note the peak measured last."""
        self.peaks.append(self._rotor.measured_peak_bytes)


def row(name: str, workload: Workload, share: str, limit_bytes: int, plain: Any, plain_peak: int) -> tuple[str, bool]:
    """One line of the table, and whether all is as it should be."""
    rotor = RotorCallback(limit_bytes, workload.module, show_table=False)
    followed = Followed(rotor)
    start = f"| {name} | {format_bytes(plain_peak)} | {share} | {format_bytes(limit_bytes)} |"
    plainly, planned = Seconds(), Seconds()
    train(workload, [plainly])
    try:
        model = train(workload, [rotor, followed, planned])
    except BudgetError as error:
        return f"{start} **refused: at least {error.minimum_bytes:,} of {limit_bytes:,} bytes** | | | | | |", False
    assert rotor.plan is not None
    same = all(map(torch.equal, plain.state_dict().values(), model.state_dict().values())) and all(
        map(torch.equal, plain.losses, model.losses)
    )
    later = [peak for peak in followed.peaks[1:] if peak is not None]
    peak = max(later, default=0)
    calls = ", ".join(getattr(rotor.plan, "names", ()) or ("one",))
    good = same and 0 < peak <= limit_bytes
    text = (
        f"{start} {format_bytes(peak)} | {'yes' if same else '**no**'} | {rotor.plan.overhead:.1%} | "
        f"{planned.of_a_step / plainly.of_a_step - 1:.1%} | "
        f"{'yes' if good else '**no**'} | {calls} |"
    )
    return text, good


def least_limit(workload: Workload) -> int:
    """The minimum that the error for a limit that is much too low names."""
    try:
        train(workload, [RotorCallback("10KiB", workload.module, show_table=False)])
    except BudgetError as error:
        return error.minimum_bytes
    raise AssertionError("10 KiB were enough")


def rows(name: str) -> tuple[list[str], bool]:
    """Lines for one model."""
    workload = WORKLOADS[name]
    peaks = Peaks()
    plain = train(workload, [peaks])
    plain_peak = max(peaks.peaks[2:])
    least = least_limit(workload)
    limits = {"least": least, "60 %": int(0.6 * plain_peak), "80 %": int(0.8 * plain_peak)}
    found = [row(name, workload, share, limit, plain, plain_peak) for share, limit in limits.items() if limit >= least]
    return [text for text, _ in found], all(good for _, good in found)


def main() -> None:
    """Measure, print, and write the table if it has all models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(WORKLOADS), choices=WORKLOADS)
    given = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    lines = [
        "# One limit for steps that call several modules",
        "",
        f"`python -m benchmarks.steps`, torch {torch.__version__}, {platform.machine()}, one thread, {STEPS} steps. Peaks from the",
        "allocator; the largest from the second step on. Least is the minimum that the error for a smaller limit names.",
        "Overheads are shares of a plain step; the measured one is of processor time, in the last six steps.",
        "",
        "| model | plain peak | limit | bytes | peak | same bits | predicted overhead | measured | limit kept | calls |",
        "|---|---:|---|---:|---:|---|---:|---:|---|---|",
    ]
    for name in given.models:
        found, _ = rows(name)
        print(*found, sep="\n", flush=True)
        lines += found
    if set(given.models) == set(WORKLOADS):
        RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
