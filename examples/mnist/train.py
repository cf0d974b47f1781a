"""Train the same network twice, plainly and inside a memory limit, and show what the limit costs.

python train.py                     scikit-learn's digits, no download
python train.py --data mnist        torchvision's MNIST
python train.py --limit 100MiB      another limit
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from data import DigitData
from model import DigitClassifier
from rich.console import Console
from rich.table import Table

from lightning_rotor.callbacks import RotorCallback
from lightning_rotor.errors import RotorError
from lightning_rotor.memory.resident_memory import allocated_bytes
from lightning_rotor.private.values import tensors_in
from lightning_rotor.profiling import Recording, StepMeter
from lightning_rotor.report import plot_timeline
from lightning_rotor.units import format_bytes, format_seconds, parse_bytes

HERE = Path(__file__).parent
EPOCHS = {"digits": 8, "mnist": 1}
DEFAULT_SHARE = 0.6  # of the memory that plain training takes


@dataclass(frozen=True)
class Run:
    """What one training showed.

    Attributes:
        constant_bytes: Weights, gradients, optimizer state and batch when the measured step began.
        trace: Memory of that step beyond them.
        step_seconds: Duration of the fastest step: of the processor on a CPU, which other programs may use meanwhile.
        accuracy: On the test images.
        weights: The final state_dict.
    """

    constant_bytes: int
    trace: Recording
    step_seconds: float
    accuracy: float
    weights: dict[str, torch.Tensor]

    @property
    def peak_bytes(self) -> int:
        """Most memory that the training process holds on the device during a step."""
        return self.constant_bytes + self.trace.peak_bytes

    @property
    def timeline(self) -> list[tuple[float, int]]:
        """Seconds since the start of the step, and what the process holds on the device.

        A step that is measured takes longer than others, and so does any beside other programs: it is told as taking
        the seconds of the fastest one.
        """
        faster = self.step_seconds / self.trace.timeline[-1][0]
        return [(faster * seconds, self.constant_bytes + level) for seconds, level in self.trace.timeline]


class StepRecorder(L.Callback):
    """Times the training steps and measures the memory of the last one."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.constant_bytes = 0
        self.trace: Recording | None = None

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:  # noqa: D102
        self._meter = None
        # The last two: torch sees a block go only if it saw it come, and gradients live from one step to the next.
        if trainer.global_step >= trainer.estimated_stepping_batches - 2:
            self.constant_bytes = allocated_bytes(module, trainer.optimizers, tensors_in(batch), module.device)
            self._meter = StepMeter(module.device)
            self._meter.start()
        self._start = self._now(module)

    def on_train_batch_end(  # noqa: D102
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._meter is not None:
            self.trace = self._meter.stop()  # measured, so not timed
            return
        self.seconds.append(self._now(module) - self._start)

    @staticmethod
    def _now(module: L.LightningModule) -> float:
        if module.device.type == "cpu":
            return time.process_time() / torch.get_num_threads()
        torch.cuda.synchronize(module.device)
        return time.perf_counter()

    @property
    def step_seconds(self) -> float:
        """The fastest one."""
        return min(self.seconds)


def train(arguments: argparse.Namespace, callbacks: list[L.Callback]) -> Run:
    """Train from the same seed with additional callbacks."""
    L.seed_everything(arguments.seed, workers=True, verbose=False)
    module = DigitClassifier(width=arguments.width)
    data = DigitData(arguments.data, batch_size=arguments.batch_size)
    recorder = StepRecorder()
    trainer = L.Trainer(
        accelerator=arguments.accelerator,
        devices=1,
        max_epochs=arguments.epochs or EPOCHS[arguments.data],
        deterministic=True,
        callbacks=[*callbacks, recorder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    (result,) = trainer.test(module, datamodule=data, verbose=False)
    if recorder.trace is None or not recorder.seconds:
        raise SystemExit(
            f"{trainer.global_step} steps were trained, too few to compare: raise --epochs or lower --batch-size"
        )
    weights = {name: tensor.cpu() for name, tensor in module.state_dict().items()}
    return Run(recorder.constant_bytes, recorder.trace, recorder.step_seconds, result["test_accuracy"], weights)


def same_weights(first: Run, second: Run) -> bool:
    """Every parameter and buffer is equal bit for bit."""
    return first.weights.keys() == second.weights.keys() and all(
        torch.equal(tensor, second.weights[name]) for name, tensor in first.weights.items()
    )


def comparison(plain: Run, limited: Run, rotor: RotorCallback) -> Table:
    """Both runs side by side."""
    table = Table(title="Training without and with RotorCallback", title_justify="left")
    for heading in ("", "plain", f"limit {format_bytes(rotor.budget_bytes)}", "change"):
        table.add_column(heading, justify="right" if heading else "left")
    memory = limited.peak_bytes / plain.peak_bytes - 1
    duration = limited.step_seconds / plain.step_seconds - 1
    table.add_row(
        "peak memory of a step", format_bytes(plain.peak_bytes), format_bytes(limited.peak_bytes), f"{memory:+.0%}"
    )
    table.add_row(
        "time of the fastest step",
        format_seconds(plain.step_seconds),
        format_seconds(limited.step_seconds),
        f"{duration:+.0%}",
    )
    table.add_row("test accuracy", f"{plain.accuracy:.2%}", f"{limited.accuracy:.2%}", "")
    table.add_row("final weights identical", "", "yes" if same_weights(plain, limited) else "NO", "")
    table.add_row("layers recomputed", "none", f"{len(rotor.plan.recomputed)} of {len(rotor.plan.chain)}", "")
    return table


def draw(plain: Run, limited: Run, limit_bytes: int, path: Path) -> None:
    """Memory over the time of one training step, both runs in one picture."""
    figure = plot_timeline(
        measured={"plain": plain.timeline, "with RotorCallback": limited.timeline}, budget_bytes=limit_bytes
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)


def main() -> None:
    """Train, compare, draw."""
    arguments = _parse_arguments()
    _silence_lightning()
    console = Console()
    try:
        console.print("Training without a limit ...")
        plain = train(arguments, [])
        limit_bytes = arguments.limit or int(DEFAULT_SHARE * plain.peak_bytes)
        console.print(f"Training inside {format_bytes(limit_bytes)} ...")
        rotor = RotorCallback(mem_limit=limit_bytes, show_table=False)  # the table below has it all
        limited = train(arguments, [rotor])
    except (RotorError, RuntimeError) as error:
        sys.exit(str(error))
    console.print(comparison(plain, limited, rotor))
    if plain.trace.timeline:  # CUDA's allocator gives the peak alone
        path = arguments.output / "memory.png"
        draw(plain, limited, limit_bytes, path)
        console.print(f"Memory over time: {path.resolve()}", soft_wrap=True)
    if not same_weights(plain, limited) or limited.peak_bytes > limit_bytes:
        sys.exit("The run with the limit should have the same weights and stay inside it, but does not.")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--data", choices=sorted(EPOCHS), default="digits", help="scikit-learn's digits, or MNIST with its download"
    )
    parser.add_argument(
        "--limit",
        type=_size,
        help=f"memory of the second run, such as 100MiB; otherwise {DEFAULT_SHARE:.0%} of what the first one took",
    )
    parser.add_argument(
        "--epochs",
        type=int,
        help=f"passes over the images; otherwise {EPOCHS['digits']} for digits, {EPOCHS['mnist']} for MNIST",
    )
    parser.add_argument("--batch-size", type=int, default=256, help="images in a step")
    parser.add_argument("--width", type=int, default=32, help="channels of the first two convolutions")
    parser.add_argument("--seed", type=int, default=0, help="of both runs")
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu", help="where to train")
    parser.add_argument("--output", type=Path, default=HERE / "output", help="folder of the picture")
    return parser.parse_args()


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except RotorError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _silence_lightning() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=".*number of training batches .* is smaller than the logging interval")
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)  # Lightning 2.6 on torch 2.14


if __name__ == "__main__":
    main()
