"""Memory against time: this package beside what people use today, on the same models in the same run.

    python -m benchmarks.frontier                       all workloads; those with a result are skipped
    python -m benchmarks.frontier gpt8 unet             some of them
    python -m benchmarks.frontier --again gpt8          although there is a result
    python -m benchmarks.frontier --device cuda         on a GPU, with batch sizes that fill more of it
    python -m benchmarks.frontier --methods ours block  some of the methods only

Both axes are ratios to plain eager PyTorch. The peak is the allocator's in one step that makes all gradients anew, above what is allocated
before it (weights and inputs); the output is held, as by the variable of a training loop. Times, on the CPU the processor's, are taken in
turns: every method once, then again. How slow the machine was in a round is the median over the methods of their times by their usual ones; a
method's time is the median over the rounds of what is left when that is divided out. The C library keeps freed memory (``MALLOC_*``): else every
now and then a step, whichever it is, has its memory taken away and faulted in again, a tenth of its time. This package is asked for the peak that
each other method has reached, and for a few in between.

The fastest of many noisy figures is too fast. So who is compared with whom is decided by a few rounds, and what the comparison says by as many
final ones as are asked for, of eager, of all others, and of our points that were the fastest or take the most memory at each of their peaks.

=================  ============================================================================================
method             what it is
=================  ============================================================================================
ours               ``Checkpointable(module, sample, mem_limit=...)``, eager
ours-compiled      the same with blocks that are compiled, each of which may run under one of several activation memory budgets
ours-whole         the same with the whole model compiled, one stage that may run under one of several budgets
block              ``torch.utils.checkpoint`` around every block
sequential         ``checkpoint_sequential``: k segments of blocks, the last of them plain
selective          checkpoint around every block with a hand-written policy that saves matrix products and convolutions
sac-ilp            checkpoint around the blocks that torch's ``sac_milp`` chooses, with its policies (``frontier_sac.py``; CPU only)
compile            ``torch.compile`` of the whole model under ``activation_memory_budget``
compile-block      the same for each block
=================  ============================================================================================

Compiled code has other bits than eager code, and may be wrong without a word where it recomputes random numbers; no workload draws any. The
gradients of each point are compared with eager's all the same: *off* is the largest difference by the largest entry of all.

One process a workload, one thread on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np

from benchmarks.frontier_report import OURS, finalists, picture, table

RESULTS = Path(__file__).parent / "results"
BUDGETS = (1.0, 0.7, 0.5, 0.3, 0.1, 0.0)
METHODS = (
    "block",
    "sequential",
    "selective",
    "sac-ilp",
    "compile-block",
    "compile",
    "ours",
    "ours-compiled",
    "ours-whole",
)
LEAST_ROUNDS = 8
LOSS_BYTES = 8  # of the loss, outside of the module
SHARES = (0.9, 0.7, 0.5, 0.4, 0.3, 0.2)
_numbers = count()  # of compiled functions
BETWEEN = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)


def main() -> None:
    """Run what is asked for, one subprocess each, and write the results after each."""
    from benchmarks.frontier_workloads import KEEP_MEMORY, WORKLOADS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", choices=[*WORKLOADS, []], help="all by default")
    parser.add_argument("--again", action="store_true", help="run workloads that have a result as well")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--to", help="name of the results; by default the device")
    parser.add_argument("--small", action="store_true", help="the CPU's sizes on a GPU")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--between", nargs="*", type=float, default=BETWEEN, help="shares of eager's peak for ours")
    parser.add_argument("--rounds", type=int, default=4, help="timed rounds of all points")
    parser.add_argument("--final-rounds", type=int, default=40, help="timed rounds of those that are compared")
    parser.add_argument(
        "--final-seconds",
        type=float,
        default=400,
        help="for them, roughly: fewer rounds of long steps, but not below 8",
    )
    parser.add_argument("--limit", type=float, default=3600, help="seconds for one workload")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(
            json.dumps(
                measure(
                    options.workloads[0],
                    options.device,
                    options.methods,
                    options.rounds,
                    options.final_rounds,
                    options.final_seconds,
                    between=options.between,
                    small=options.small or options.device == "cpu",
                )
            )
        )
        return
    results = RESULTS / f"frontier_{options.to or options.device}.json"
    rows: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}
    for name in options.workloads or WORKLOADS:
        if name in rows and not options.again:
            continue
        command = [sys.executable, "-m", "benchmarks.frontier", "--one", name, "--device", options.device]
        command += ["--rounds", str(options.rounds), "--final-rounds", str(options.final_rounds)]
        command += ["--final-seconds", str(options.final_seconds)]
        command += ["--between", *map(str, options.between)]
        command += ["--methods", *options.methods, *(["--small"] if options.small else [])]
        environment = {**os.environ, **KEEP_MEMORY, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, timeout=options.limit, check=True
        )
        rows[name] = json.loads(done.stdout.splitlines()[-1])
        results.write_text(json.dumps(rows, indent=1) + "\n")
        report(rows, options.to or options.device)


# -------------------------------------------------------------------- measuring


def measure(
    name: str,
    device: str,
    methods: Sequence[str],
    rounds: int,
    final_rounds: int,
    final_seconds: float,
    *,
    between: Sequence[float],
    small: bool,
) -> dict[str, Any]:
    """All methods on one workload."""
    import torch

    from benchmarks.frontier_workloads import WORKLOADS

    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = (
        1000  # a budget each, and shapes
    )
    workload = WORKLOADS[name](device, small)
    plain = partial(workload.net, *workload.inputs)
    points = [Point("eager", "", plain)]
    expected = gradients(workload, plain)
    points[0].measure(workload, expected)
    base = points[0].peak_bytes
    for method in methods:
        if method not in OURS:
            for point in others(method, workload, partial(WORKLOADS[name], device, small)):
                print(f"{name} {method} {point.setting}", file=sys.stderr, flush=True)
                point.measure(workload, expected)
                points.append(point)
    # Not more than the other's bytes, so not rounded.
    wanted = sorted({point.peak_bytes for point in points[1:] if point.peak_bytes} | {int(base * at) for at in between})
    if "ours" in methods:
        points += ours(workload, workload.net, wanted, expected, "ours", _nothing)
    if "ours-compiled" in methods:
        context = compiled_blocks(workload.blocks)
        points += ours(workload, workload.net, wanted, expected, "ours-compiled", context)
    if "ours-whole" in methods:
        whole = torch.compile(workload.net if len(workload.inputs) == 1 else together(workload.net))
        points += ours(workload, whole, wanted, expected, "ours-whole", _nothing)
    again = Point("eager", "again", plain)  # what differs from 1 is noise
    again.measure(workload, expected)
    points.insert(1, again)
    eager_seconds = time_in_turns([point for point in points if not point.failed], workload, rounds)
    chosen = finalists([point.row(base) for point in points])
    final = [point for point, is_final in zip(points, chosen, strict=True) if is_final]
    affordable = int(final_seconds / (eager_seconds * len(final)))
    final_rounds = min(final_rounds, max(affordable, LEAST_ROUNDS))
    time_in_turns(final, workload, final_rounds)
    for point in final:
        point.is_final = True
    return {
        "device": device if device == "cpu" else torch.cuda.get_device_name(),
        "machine": f"{platform.processor() or platform.machine()}, load {os.getloadavg()[0]:.1f}",
        "torch": torch.__version__,
        "eager_peak_bytes": base,
        "eager_seconds": round(eager_seconds, 4),
        "rounds": rounds,
        "final_rounds": final_rounds,
        "left_out": [method for method in METHODS if method not in methods],
        "points": [point.row(base) for point in points],
    }


def time_in_turns(points: Sequence[Point], workload: Any, rounds: int) -> float:
    """Set the times of points by the first one's; returns its seconds."""
    gc.collect()
    gc.freeze()  # the collections before each step look at what came later only
    seconds = np.array([[point.time(workload) for point in points] for _ in range(rounds)])
    gc.unfreeze()
    pace = np.median(seconds / np.median(seconds, axis=0), axis=1, keepdims=True)
    typical = np.median(seconds / pace, axis=0)
    for point, ratio in zip(points, typical / typical[0], strict=True):
        point.time_ratio = float(ratio)
    return float(typical[0])


class Point:
    """A method under one setting.

    Args:
        method: Its name.
        setting: What tells it from others of the method.
        forward: Returns the output; what has to be attached to the model first is in ``context``.
        context: Makes a context in which the model runs by the method.
    """

    def __init__(self, method: str, setting: str, forward: Callable[[], Any], context: Any = None) -> None:
        self.method, self.setting, self.forward = method, setting, forward
        self.context = context or _nothing
        self.peak_bytes = self.predicted_bytes = 0
        self.time_ratio = 0.0
        self.same_bits = self.is_final = False
        self.off = 0.0
        self.failed = ""

    def measure(self, workload: Any, expected: list[Any]) -> None:
        """The allocator's peak, and whether the gradients are eager's."""
        import torch

        try:
            with self.context():
                for _ in range(2):  # compiles
                    received = gradients(workload, self.forward)
                self.same_bits = all(map(torch.equal, expected, received))
                self.off = difference(expected, received)
                del received
                self.peak_bytes = peak_of_step(workload, self.forward)
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Note why there are no figures."""
        self.failed = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:200]

    def time(self, workload: Any) -> float:
        """Seconds of one step."""
        import torch

        with self.context():
            workload.net.zero_grad()
            gc.collect()
            synchronize = torch.cuda.synchronize if workload.device == "cuda" else _nothing_to_wait_for
            synchronize()
            # On one thread of a shared machine, what others do counts less this way.
            clock = time.perf_counter if workload.device == "cuda" else time.process_time
            start = clock()
            step(workload, self.forward)
            synchronize()
            return clock() - start

    def row(self, base: int) -> dict[str, Any]:
        """For the results."""
        if self.failed:
            return {"method": self.method, "setting": self.setting, "failed": self.failed}
        return {
            "method": self.method,
            "setting": self.setting,
            "peak": round(self.peak_bytes / base, 4),
            "peak_bytes": self.peak_bytes,
            "predicted_bytes": self.predicted_bytes,
            "time": round(self.time_ratio, 4),
            "final": self.is_final,
            "same_bits": self.same_bits,
            "off": float(f"{self.off:.1e}"),
        }


def difference(expected: Sequence[Any], received: Sequence[Any]) -> float:
    """The largest of all gradients, by the largest entry of all: those that are zero but for rounding have no size of their own."""
    largest = max(float(gradient.abs().max()) for gradient in expected)
    return max(float((one - other).abs().max()) for one, other in zip(expected, received, strict=True)) / largest


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _nothing_to_wait_for() -> None:
    pass


def step(workload: Any, forward: Callable[[], Any]) -> None:
    """As in a training loop, whose variable holds the output until the next step."""
    output = forward()
    workload.loss(output).backward()


def gradients(workload: Any, forward: Callable[[], Any]) -> list[Any]:
    """Of one step from the same state of the generators."""
    import torch

    workload.net.zero_grad()
    torch.manual_seed(1)
    step(workload, forward)
    found = [parameter.grad.clone() for parameter in workload.net.parameters() if parameter.grad is not None]
    workload.net.zero_grad()
    return found


def peak_of_step(workload: Any, forward: Callable[[], Any]) -> int:
    """The allocator's peak above what is there before the step."""
    import torch

    from lightning_rotor.profiling import StepMeter

    workload.net.zero_grad()
    meter = StepMeter(torch.device(workload.device))
    gc.collect()
    gc.disable()
    meter.start()
    step(workload, forward)
    trace = meter.stop()
    gc.enable()
    return trace.peak_bytes


# -------------------------------------------------------------------- methods


def ours(
    workload: Any, module: Any, peaks: Sequence[int], expected: list[Any], method: str, context: Callable[[], Any]
) -> list[Point]:
    """This package at the peaks that others have reached, and in between.

    Args:
        workload: The model and its input.
        module: The model, or what it is in.
        peaks: In bytes.
        expected: Gradients.
        method: Name of the points.
        context: In which it is planned and runs.
    """
    from lightning_rotor import BudgetError, Checkpointable

    inputs = workload.inputs
    if module is not workload.net and len(inputs) > 1:
        inputs = (inputs,)  # a compiled whole takes one argument
    try:
        with context():
            net = Checkpointable(module, inputs, compiled_variants="close", show_progress=False)
    except Exception as error:  # the compiler's
        point = Point(method, "", partial(module, *inputs))
        point.fail(error)
        return [point]
    points: dict[str, Point] = {}
    for peak in peaks:
        try:
            with context():
                plan = net.compute_sequence(peak - LOSS_BYTES)
        except BudgetError:
            continue
        if str(plan.schedule) in points:
            continue
        inside = partial(_planned, net, plan, context)
        point = Point(method, f"{peak / 1e6:.1f} MB", partial(net, *inputs), inside)
        print(f"{workload.device} {method} {peak:,}", file=sys.stderr, flush=True)
        point.measure(workload, expected)
        point.predicted_bytes = plan.peak_bytes
        points[str(plan.schedule)] = point
    return list(points.values())


def together(net: Any) -> Any:
    """A model that takes its arguments as one tuple."""
    import torch

    class Together(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, inputs: Sequence[Any]) -> Any:
            return self.net(*inputs)

    return Together()


@contextmanager
def _planned(net: Any, plan: Any, context: Callable[[], Any]) -> Iterator[None]:
    with context():
        if net.plan is not plan:
            net.use(plan)
        yield


def compiled_blocks(blocks: Sequence[Any]) -> Callable[[], Any]:
    """Makes a context in which the blocks are compiled, the same code every time."""
    for block in blocks:
        block.compile()
    compiled = {block: block._compiled_call_impl for block in blocks}
    for block in blocks:
        block._compiled_call_impl = None

    @contextmanager
    def context() -> Iterator[None]:
        for block in blocks:
            block._compiled_call_impl = compiled[block]
        try:
            yield
        finally:
            for block in blocks:
                block._compiled_call_impl = None

    return context


def others(method: str, workload: Any, build: Callable[[], Any]) -> Iterator[Point]:
    """The points of a method that is not ours; ``build`` makes the workload once more."""
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    plain = partial(workload.net, *workload.inputs)
    if method == "block":
        wrap = partial(partial, checkpoint, use_reentrant=False)
        yield Point(method, "", plain, partial(wrapped, workload.blocks, lambda _, forward: wrap(forward)))
    elif method == "selective":
        contexts = partial(create_selective_checkpoint_contexts, _policy)
        wrap = partial(partial, checkpoint, use_reentrant=False, context_fn=contexts)
        yield Point(method, "", plain, partial(wrapped, workload.blocks, lambda _, forward: wrap(forward)))
    elif method == "sac-ilp" and workload.device == "cpu":
        yield from by_milp(workload, build, plain)
    elif method == "sequential" and workload.in_a_row:
        for count in segment_counts(len(workload.blocks)):
            yield Point(method, f"{count} segments", plain, partial(segmented, workload.blocks, count))
    elif method in ("compile", "compile-block"):
        for budget in BUDGETS:
            compiled = compiled_under(budget)
            if method == "compile":
                yield Point(method, f"budget {budget}", partial(compiled, workload.net, *workload.inputs))
            else:
                context = partial(wrapped, workload.blocks, partial(_compiled_block, compiled))
                yield Point(method, f"budget {budget}", plain, context)


def by_milp(workload: Any, build: Callable[[], Any], plain: Callable[[], Any]) -> Iterator[Point]:
    """Points of torch's automatic selective checkpointing."""
    from torch.utils.checkpoint import checkpoint

    def wrap(chosen: dict[int, Any], block: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        policy = chosen[id(block)]
        if policy is None:
            return forward
        return partial(checkpoint, forward, use_reentrant=False, context_fn=partial(contexts, policy))

    try:
        from benchmarks.frontier_sac import contexts, policies

        for setting, chosen in policies(build, lambda each: step(each, partial(each.net, *each.inputs)), SHARES):
            of_block = dict(zip(map(id, workload.blocks), chosen, strict=True))
            yield Point("sac-ilp", setting, plain, partial(wrapped, workload.blocks, partial(wrap, of_block)))
    except Exception as error:  # what its estimators cannot run
        failed = Point("sac-ilp", "", plain)
        failed.fail(error)
        yield failed


def compiled_under(budget: float) -> Callable[..., Any]:
    """A compiled function that calls a module.

    Its code is its own, for compiled code is kept with the code that it was made from. So is its name, by which torch
    notes sizes that have changed: blocks of several sizes would make the whole model one of any size, which Inductor
    cannot always compile.
    """
    import torch

    def backend(graph: Any, inputs: Sequence[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        with torch._functorch.config.patch(activation_memory_budget=budget):
            return compile_fx(graph, inputs)

    code = _call.__code__.replace(co_name=f"_call_{next(_numbers)}")
    return torch.compile(FunctionType(code, globals()), backend=backend)


def _call(module: Any, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def _compiled_block(compiled: Callable[..., Any], block: Any, _: Any) -> Callable[..., Any]:
    return partial(compiled, block)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
    import torch
    from torch.utils.checkpoint import CheckpointPolicy

    aten = torch.ops.aten
    dear = (
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    )
    return CheckpointPolicy.MUST_SAVE if operation in dear else CheckpointPolicy.PREFER_RECOMPUTE


def segment_counts(blocks: int) -> list[int]:
    """Every number of segments that makes a difference."""
    return list(range(2, blocks + 1)) if blocks <= 10 else sorted({2, 3, 4, 6, 8, blocks // 2, blocks})


@contextmanager
def wrapped(blocks: Sequence[Any], wrap: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Context in which the forward of each block is another one.

    A list among its arguments is copied, as whoever wraps a layer of a DenseNet must: the model appends to it before the layer is recomputed.
    """

    def copying(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return forward(*([*arg] if isinstance(arg, list) else arg for arg in args), **kwargs)

    for block in blocks:
        block.forward = partial(copying, wrap(block, block.forward))
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


@contextmanager
def segmented(blocks: Sequence[Any], count: int) -> Iterator[None]:
    """``checkpoint_sequential`` for blocks that a model calls one after the other: the first block of a segment runs all of it."""
    from torch.utils.checkpoint import checkpoint

    size = len(blocks) // count
    last = size * (count - 1)

    def run(forwards: Sequence[Any], value: Any, *args: Any, **kwargs: Any) -> Any:
        for forward in forwards:
            value = forward(value, *args, **kwargs)
        return value

    def through(value: Any, *args: Any, **kwargs: Any) -> Any:
        return value

    forwards = [block.forward for block in blocks]
    try:
        for start in range(0, last, size):
            inside = partial(run, forwards[start : start + size])
            blocks[start].forward = partial(checkpoint, inside, use_reentrant=False)
            for block in blocks[start + 1 : start + size]:
                block.forward = through
        yield
    finally:
        for block in blocks[:last]:
            del block.forward


# -------------------------------------------------------------------- results


def report(rows: dict[str, Any], name: str) -> None:
    """The table and the picture."""
    (RESULTS / f"frontier_{name}.md").write_text(table(rows))
    picture(rows, RESULTS / f"frontier_{name}.png")


if __name__ == "__main__":
    main()
