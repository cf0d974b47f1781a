"""What a GPU alone can tell of plans that move things to the host: seconds, overlap, and bits while copies are late.

    python -m benchmarks.offload_cuda --to FILE
    python -m tests.cuda_device -m benchmarks.offload_cuda --small --to FILE     tries the command on the simulated device

For a GPT under bf16 autocast and a U-Net, at limits of shares of the plain step's peak: the step under a plan that may move things, and under
one that may not, in turns. Peaks are the allocator's, without the loss. *Late copies*: kernels that do nothing hold up both copying streams, or the
computing one, at the beginning of the step. Each part that fails says so in the table, and the others go on.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu

from benchmarks.cuda_memory import GPU, Loss
from lightning_rotor import BudgetError, Checkpointable, Plan
from lightning_rotor.execution.pinned_memory import PinnedMemory
from lightning_rotor.link import Link
from lightning_rotor.planning import plan as planned_within
from lightning_rotor.profiling.cuda_recording import await_autograd
from lightning_rotor.units import format_bytes, format_seconds

SHARES = (0.7, 0.5, 0.35)
SCALARS = 2 * 512
"""The loss and its gradient."""

# ---------------------------------------------------------------------------------------------------- models


class Attention(nn.Module):
    """Causal self-attention with its residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.project = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same."""
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.project(mixed.transpose(1, 2).flatten(2))


class Feed(nn.Module):
    """Two linear layers with their residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same."""
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


def gpt(small: bool) -> tuple[nn.Module, torch.Tensor]:
    """A GPT, and tokens."""
    blocks, width, batch, length = (4, 64, 2, 64) if small else (12, 1024, 8, 1024)
    layers = [layer for _ in range(blocks) for layer in (Attention(width, width // 64), Feed(width))]
    net = nn.Sequential(nn.Embedding(1000, width), *layers, nn.LayerNorm(width), nn.Linear(width, 1000))
    return net.to(GPU), torch.randint(0, 1000, (batch, length), device=GPU)


def convolutions(given: int, made: int) -> nn.Sequential:
    """Two convolutions with normalization."""
    layers: list[nn.Module] = []
    for channels in (given, made):
        layers += [nn.Conv2d(channels, made, 3, padding=1, bias=False), nn.BatchNorm2d(made), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """A U-Net of three levels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = convolutions(3, width), convolutions(width, 2 * width)
        self.middle = convolutions(2 * width, 4 * width)
        self.lift2, self.lift1 = (
            nn.ConvTranspose2d(4 * width, 2 * width, 2, 2),
            nn.ConvTranspose2d(2 * width, width, 2, 2),
        )
        self.up2, self.up1 = convolutions(4 * width, 2 * width), convolutions(2 * width, width)
        self.head = nn.Conv2d(width, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 3, height, width) to (batch, 4, height, width)."""
        one = self.first(x)
        two = self.second(F.max_pool2d(one, 2))
        x = self.middle(F.max_pool2d(two, 2))
        x = self.up2(torch.cat([two, self.lift2(x)], 1))
        return self.head(self.up1(torch.cat([one, self.lift1(x)], 1)))


def unet(small: bool) -> tuple[nn.Module, torch.Tensor]:
    """A U-Net, and images."""
    width, batch, size = (8, 2, 32) if small else (64, 16, 256)
    return UNet(width).to(GPU), torch.randn(batch, 3, size, size, device=GPU)


WORKLOADS: dict[str, tuple[Callable[[bool], tuple[nn.Module, torch.Tensor]], bool]] = {
    "GPT, bf16": (gpt, True),
    "U-Net, fp32": (unet, False),
}

# ---------------------------------------------------------------------------------------------------- steps


@dataclass
class Steps:
    """Runs steps of a model, and measures them."""

    net: nn.Module
    batch: torch.Tensor
    autocast: bool

    def run(self, forward: Callable[[Any], Any]) -> None:
        """One step."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast, cache_enabled=False):
            output = forward(self.batch)
        Loss.apply(output).backward()

    def gradients(self, forward: Callable[[Any], Any]) -> list[torch.Tensor]:
        """Gradients of a step from fixed seeds."""
        self.net.zero_grad()
        torch.manual_seed(1)
        self.run(forward)
        return [parameter.grad.clone() for parameter in self.net.parameters() if parameter.grad is not None]

    def peak_bytes(self, forward: Callable[[Any], Any]) -> int:
        """The allocator's peak above what was allocated before."""
        self.net.zero_grad()
        await_autograd(GPU)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.run(forward)
        return torch.cuda.max_memory_allocated() - before - SCALARS

    def seconds(self, forward: Callable[[Any], Any], count: int) -> float:
        """Of one step, the mean of some behind each other."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            self.net.zero_grad()
            self.run(forward)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / count


@dataclass
class Way:
    """A way to run a step, and what was measured of it."""

    name: str
    limit_bytes: int
    plan: Plan | None
    forward: Callable[[Any], Any]
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    bits: str = ""

    def row(self, workload: str, plain_seconds: float) -> str:
        """A row of the table."""
        seconds = statistics.median(self.seconds) if self.seconds else 0.0
        plan = self.plan
        predicted, told, moved, late = "", "", "", ""
        if plan is not None:
            predicted = f"{plan.overhead:+.1%}"
            told = f"{format_bytes(plan.peak_bytes)} ({self.peak_bytes - plan.peak_bytes:+,} B)"
            moved = f"{len(plan.moved)}/{len(plan.recomputed)}/{len(plan.chain)}"
            late = f"{format_bytes(plan.host_bytes)}, {format_seconds(plan.stall_seconds)}"
        return (
            f"| {workload} | {format_bytes(self.limit_bytes)} | {self.name} | {format_seconds(seconds)} | {seconds / plain_seconds - 1:+.1%} | "
            f"{predicted} | {format_bytes(self.peak_bytes)} | {told} | {moved} | {late} | {self.bits} |"
        )


HEAD = (
    "| model | limit | way | step | measured | predicted | peak | predicted (measured more) | moved/recomputed/all | host, waits | bits |",
    "|---|--:|---|--:|--:|--:|--:|--:|--:|--:|---|",
)


def held_up(memory: PinnedMemory | None, which: str) -> None:
    """Let some streams do nothing for a while, so that what does not wait for them comes first."""
    cycles = 30_000_000
    if not hasattr(torch.cuda, "_sleep") or torch.cuda.get_device_name().startswith("Simulated"):
        return
    streams = [torch.cuda.current_stream()] if which == "compute" or memory is None else [memory.out, memory.back]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)


def bits_of(steps: Steps, way: Way, expected: list[torch.Tensor], memory: PinnedMemory | None) -> str:
    """The gradients against plain ones: as it comes, with late copies, and with a late computation."""
    found = []
    for which in ("", "copies", "compute"):
        if which:
            held_up(memory, which)
        same = all(map(torch.equal, expected, steps.gradients(way.forward)))
        found.append("same" if same else f"DIFFERENT{' with late ' * bool(which)}{which}")
    return found[0] if len(set(found)) == 1 else ", ".join(found)


def waits_of_the_host(steps: Steps, way: Way) -> str:
    """How often a step makes Python wait for the device, under its plan and plainly."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            steps.run(way.forward)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lines = {f"{Path(each.filename).name}:{each.lineno}" for each in caught if "synchroniz" in str(each.message)}
    return f"{len(lines)} places ({', '.join(sorted(lines))})" if lines else "never"


def workload(name: str, small: bool, until: float) -> Iterator[str]:
    """Rows of one model."""
    make, autocast = WORKLOADS[name]
    torch.manual_seed(0)
    net, batch = make(small)
    steps = Steps(net, batch, autocast)
    torch.use_deterministic_algorithms(True)
    try:
        steps.run(net)
    except RuntimeError:  # an operator has no such kernel
        torch.use_deterministic_algorithms(True, warn_only=True)
    steps.run(net)
    expected = steps.gradients(net)
    repeats = all(map(torch.equal, expected, steps.gradients(net)))
    plain = Way("plain", 0, None, net, bits="repeats" if repeats else "does not repeat")
    plain.peak_bytes = steps.peak_bytes(net)
    began = time.perf_counter()
    planned = Checkpointable(net, offload="host", show_progress=False)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast, cache_enabled=False):
        chain = planned.measure(batch)
    measuring = time.perf_counter() - began
    began = time.perf_counter()
    ways: list[Way] = [plain]
    notes = []
    memory: PinnedMemory | None = None
    link: Link | None = None
    for share in SHARES:
        limit = int(share * plain.peak_bytes)
        if time.monotonic() > until and len(ways) > 1:
            notes.append(f"No time for {share:.0%}.")
            continue
        try:
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast, cache_enabled=False):
                moving = planned.compute_sequence(limit)
            link = moving.link
            ways.append(Way("keep, recompute or move", limit, moving, planned))
        except BudgetError as error:
            notes.append(f"At {share:.0%} with moves: {error}")
        try:
            ways.append(Way("keep or recompute", limit, planned_within(chain, limit), planned))
        except BudgetError as error:
            notes.append(f"At {share:.0%} without: {error}")
    there = [*planned._planned.plans._offloadings.values()]
    if there and isinstance(there[0].memory, PinnedMemory):
        memory = there[0].memory
    planning = time.perf_counter() - began

    def under_pinned_hooks(value: Any) -> Any:
        with save_on_cpu(pin_memory=True):
            return net(value)

    ways.append(Way("save_on_cpu(pin_memory=True)", 0, None, under_pinned_hooks))

    def use(way: Way) -> None:
        if way.plan is not None:
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast, cache_enabled=False):
                planned.use(way.plan.schedule)

    count = 2 if small else 5
    rounds = 0
    while rounds < (1 if small else 4) and (rounds < 2 or time.monotonic() < until):
        for way in ways:
            use(way)
            steps.run(way.forward)
            way.seconds.append(steps.seconds(way.forward, count))
        rounds += 1
    for way in ways:
        use(way)
        way.peak_bytes = steps.peak_bytes(way.forward)
        if way is not plain:
            way.bits = bits_of(steps, way, expected, memory)
    plain_seconds = statistics.median(plain.seconds)
    for way in ways:
        yield way.row(name, plain_seconds)
    moving_way = next((way for way in ways if way.plan is not None and way.plan.moved), None)
    yield ""
    if link is not None:
        carried = link.out * plain_seconds / 3 / max(plain.peak_bytes, 1)
        yield (
            f"{name}: measuring {format_seconds(measuring)}, planning {format_seconds(planning)} for {len(chain)} stages; step by stages "
            f"{format_seconds(chain.step_seconds)}; link {link.out / 1e9:.1f} GB/s out, {link.back / 1e9:.1f} back, which carries "
            f"{carried:.0%} of the plain peak in a third of a step; {rounds} rounds of {count} steps."
        )
    if moving_way is not None and memory is not None:
        use(moving_way)
        steps.run(moving_way.forward)
        levels = []
        for _ in range(3):
            steps.run(moving_way.forward)
            levels.append((torch.cuda.memory_reserved(), memory.reserved_bytes, memory.used_bytes))
        yield (
            f"A step that moves: Python waits for the device at {waits_of_the_host(steps, moving_way)}; plainly {waits_of_the_host(steps, plain)}. "
            f"Reserved on the device, pinned, in use behind it: {', '.join(str(level) for level in sorted(set(levels)))}."
        )
        yield f"Schedule: `{moving_way.plan.schedule if moving_way.plan is not None else ''}`"
    yield from notes


def link_rows(small: bool) -> Iterator[str]:
    """GB/s of pinned copies by size, each way alone and both at once."""
    memory = PinnedMemory(GPU)
    yield "| MiB | out GB/s | back GB/s | both at once GB/s, each way | host µs a copy |"
    yield "|--:|--:|--:|--:|--:|"
    for mebibytes in (1,) if small else (1, 8, 64):
        size = mebibytes * 2**20
        repeats = 8
        memory.reserve(2 * repeats * size)
        storages = [torch.zeros(size, dtype=torch.uint8, device=GPU).untyped_storage() for _ in range(repeats)]
        for _ in range(2):  # the first one warms up
            torch.cuda.synchronize()
            began = time.perf_counter()
            copies = [memory.copy_out(storage) for storage in storages]
            host = time.perf_counter() - began
            torch.cuda.synchronize()
            out = time.perf_counter() - began
            for copy in copies:
                copy.wait_out()
            began = time.perf_counter()
            for copy in copies:
                copy.begin_back()
            torch.cuda.synchronize()
            back = time.perf_counter() - began
            for copy in copies:
                copy.wait_back()
            began = time.perf_counter()
            others = [memory.copy_out(storage) for storage in storages]
            for copy in copies:
                copy.begin_back()
            torch.cuda.synchronize()
            both = time.perf_counter() - began
            for copy in copies:
                copy.wait_back()
            del others, copies
        total = repeats * size / 1e9
        yield f"| {mebibytes} | {total / out:.1f} | {total / back:.1f} | {total / both:.1f} | {1e6 * host / repeats:.0f} |"


def main() -> None:
    """Measure, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="little of each, to see that the command works")
    parser.add_argument("--seconds", type=float, default=130.0, help="that it should take at most")
    parser.add_argument(
        "--to", type=Path, default=Path(__file__).parent / "results" / "offload_cuda.md", help="file to write"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(
            "there is no CUDA device: python -m tests.cuda_device -m benchmarks.offload_cuda --small --to FILE uses a simulated one"
        )
    torch.use_deterministic_algorithms(True, warn_only=True)
    # It would write to all memory that is taken, copies back included.
    torch.utils.deterministic.fill_uninitialized_memory = False
    warnings.filterwarnings("ignore", message=".*deterministic.*")
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    began = time.monotonic()
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout
    lines = [
        f"# Offloading on one {torch.cuda.get_device_name()}",
        "",
        f"`python -m benchmarks.offload_cuda{' --small' * options.small}`, {time.strftime('%Y-%m-%d')}, commit {commit.strip()}, torch "
        f"{torch.__version__}, {torch.cuda.mem_get_info()[1] / 2**30:.1f} GiB.",
        "",
    ]
    parts: list[tuple[str, Callable[[], Iterator[str]], tuple[str, ...]]] = []
    parts.append(("The link", lambda: link_rows(options.small), ()))
    for number, name in enumerate(WORKLOADS):
        until = began + options.seconds * (number + 1) / len(WORKLOADS) - 15
        parts.append((name, lambda name=name, until=until: workload(name, options.small, until), HEAD))  # type: ignore[misc]
    for title, rows, head in parts:
        lines += [f"## {title}", "", *head]
        started = time.monotonic()
        try:
            for row in rows():
                lines.append(row)
                print(row, flush=True)
        except Exception:
            lines += ["", "```", traceback.format_exc(), "```"]
            traceback.print_exc()
        lines += ["", f"{time.monotonic() - started:.0f} s.", ""]
        options.to.write_text("\n".join(lines), encoding="utf-8")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
