"""The engine of pipelines: real processes give what one process gives, hold what was predicted, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from pipelines import Failure, Processes, good, processes
from test_coming_from import run as example
from torch import nn
from torch.nn import functional as F

from benchmarks.pipeline_models import ROWS, Counting, Tail, build, model_of, ten_steps
from lightning_rotor.errors import PipelineError
from lightning_rotor.pipeline.micro_batches import join, rows_in, sizes_of, split
from lightning_rotor.pipeline.partition import PartitionError
from lightning_rotor.pipeline.pipeline import Pipeline
from lightning_rotor.pipeline.pipeline_options import PipelineOptions
from lightning_rotor.pipeline.pipelined import cut_for_rows, pipelined
from lightning_rotor.pipeline.processes import PipelineProcesses
from lightning_rotor.profiling.meters import CpuMeter


@pytest.fixture(scope="module")
def group() -> Iterator[Processes]:
    with processes(4) as made:
        yield made


CASES = [
    (2, "mlp", PipelineOptions(4, "gpipe", "never")),
    (2, "mlp", PipelineOptions(4, "1f1b", "except_last")),
    (3, "mlp", PipelineOptions(4, "1f1b", "always")),
    (2, "cnn", PipelineOptions(3, "1f1b", "always")),
    (2, "cnn", PipelineOptions(4, "interleaved", "rotor", stages_per_device=2)),
    (4, "cnn", PipelineOptions(4, "gpipe", "except_last", [2, 2, 2, 2])),
    (2, "transformer", PipelineOptions(4, "1f1b", "rotor")),
    (3, "transformer", PipelineOptions(3, "gpipe", "always")),
    (2, "transformer", PipelineOptions(4, "interleaved", "always", stages_per_device=2)),
    (2, "unet", PipelineOptions(4, "1f1b", "always")),
    (3, "skips", PipelineOptions(4, "1f1b", "always", [3, 1, 2])),
    (4, "unet", PipelineOptions(4, "1f1b", "never")),
    (2, "unet", PipelineOptions(4, "interleaved", "except_last", stages_per_device=2)),
]


# Each schedule, number of processes and kind of recomputation, and skips; what follows has each kind of module and no recomputation.
NEEDED = (4, 5, 10)


@pytest.mark.parametrize(
    ("world", "kind", "options"),
    [pytest.param(*case, marks=[] if number in NEEDED else pytest.mark.wide) for number, case in enumerate(CASES)],
    ids=lambda value: getattr(value, "schedule", str(value)),
)
def test_ten_steps_equal_those_of_one_process(
    group: Processes, world: int, kind: str, options: PipelineOptions
) -> None:
    for worst in good(group.run(world, ten_steps, kind, options)):
        assert max(worst.values()) <= 1e-6, worst


def plain_loop(rank: int, schedule: Any) -> tuple[float, list[str], tuple[int, ...]]:
    """How far steps in a loop without a Trainer are from those of one process."""
    torch.manual_seed(rank)  # the first process's weights count
    net = nn.Sequential(nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)))
    _, x, target = model_of("mlp")
    pipeline = Pipeline(net, x, micro_batches=4, schedule=schedule, balance=[1, 1], mem_limit="1GiB")
    with torch.no_grad():
        before = net(x)
    whole = pipeline.state_dict()
    optimizer = torch.optim.Adam(pipeline.parameters(), 1e-2)
    losses = []
    for _ in range(3):
        losses.append(pipeline.step(lambda part, wanted: F.mse_loss(net(part), wanted), x + rank, target))
        pipeline.clip_by_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()
    pipeline.close()
    if rank:
        return 0.0, [], pipeline.partition.balance

    other = nn.Sequential(
        nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    )
    other.load_state_dict(whole)
    worst, optimizer = float((other(x) - before).abs().max()), torch.optim.Adam(other.parameters(), 1e-2)
    for loss in losses:
        expected = F.mse_loss(other(x), target)
        expected.backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        worst = max(worst, float((loss - expected).abs()))
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    return max([worst, *(float((a - b).abs().max()) for a, b in pairs)]), list(whole), pipeline.partition.balance


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_plain_loop_trains_as_one_process(group: Processes, schedule: str) -> None:
    (worst, names, balance), (_, _, other) = good(group.run(2, plain_loop, schedule))
    assert worst < 1e-5
    assert names == ["0.0.weight", "0.0.bias", "1.0.weight", "1.0.bias", "1.1.weight", "1.1.bias"]
    assert balance == other == (2, 2)  # of one child each


def torchgpipes_example(rank: int) -> tuple[float, list[str], bool]:
    found = example("torchgpipe")
    return float(found["loss"]), list(found["state"]), any(each.is_meta for each in found["model"].parameters())


def test_torchgpipes_example_trains_on_four_devices(group: Processes) -> None:
    answers = good(group.run(4, torchgpipes_example))
    assert len({loss for loss, _, _ in answers}) == 1
    assert [name.rpartition(".")[0] for name in answers[0][1][::2]] == ["0.0", "1.0", "2.0", "3"]
    assert not any(left for _, _, left in answers)


def test_a_plain_loop_needs_a_process_group() -> None:
    with pytest.raises(
        PipelineError, match=r"no process group: expected torch.distributed.init_process_group\(\) before"
    ):
        Pipeline(nn.Linear(2, 2), torch.randn(4, 2))


def refused_steps(rank: int) -> list[str]:
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    x, said = torch.randn(ROWS, 16), []
    pipeline = Pipeline(net, x, micro_batches=2)
    wrong = lambda part: net(part).sum().item(), lambda part: (net(part) + net(part)).sum(), lambda part: part.sum()
    for run in (*(partial(pipeline.step, each, x) for each in wrong), partial(net, x)):
        with pytest.raises(PipelineError) as caught:
            run()
        said.append(str(caught.value))
    return said


def test_a_plain_step_that_is_none_is_refused(group: Processes) -> None:
    (said,) = good(group.run(1, refused_steps))
    what = "the function given to Pipeline.step"
    assert said[0].startswith(f"{what} returned float without a loss: expected a tensor")
    assert said[1].startswith(f"{what} called the module that is cut into pipeline stages twice")
    assert said[2].startswith(what)
    assert said[3].endswith(f"expected calls in {what}, or under torch.no_grad()")


# -------------------------------------------------------------------------------------------------- memory


def hourglasses(out: int) -> tuple[nn.Module, torch.Tensor]:
    """Four runs of five layers that are wide inside and narrow where they meet."""
    torch.manual_seed(0)
    widths = [12, 10, 6, 14, out]
    layers = [
        layer
        for narrow, end in pairwise(widths)
        for layer in (nn.Linear(narrow, 64), nn.Tanh(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, end))
    ]
    return nn.Sequential(*layers), torch.randn(256, 12)


def levels(
    rank: int, world: int, options: PipelineOptions, memory_bytes: Sequence[int | None], out: int
) -> dict[str, Any]:
    """What the allocator shows in the third step, what was predicted for it, and the most micro-batches in flight by stage."""
    model, x = hourglasses(out)
    sizes = sizes_of(len(x), options.micro_batches)
    calls, weights = split(((x,), {}), sizes), torch.randn(sizes[0], out)
    made = pipelined(
        model,
        model,
        calls[0],
        options=options,
        memory_bytes=memory_bytes[rank],
        kept=lambda tensors: 0,
        processes=PipelineProcesses(torch.device("cpu")),
    )
    inputs = made.runner.inputs(calls)

    def run() -> None:
        made.runner.run(inputs, lambda output, _: (output * weights).sum(), seed=1)

    run(), run()
    for parameter in model.parameters():
        parameter.grad = None
    stages, partition = made.runner._prepared.stages, made.partition
    in_flight = dict.fromkeys((stage.stage_index for stage in stages), 0)

    def marked(stage: Any) -> None:
        let_go, forward = stage._let_go, stage.forward_one_chunk

        def marking() -> None:
            let_go()
            recording.mark("action")

        def counting(*args: Any, **kwargs: Any) -> Any:
            made = forward(*args, **kwargs)
            in_flight[stage.stage_index] = max(in_flight[stage.stage_index], len(stage.in_flight))
            return made

        stage._let_go, stage.forward_one_chunk = marking, counting

    with CpuMeter().recording() as recording:
        for stage in stages:
            marked(stage)
        run()
    loads = [each.load for each in partition.choices]
    peak, events = partition.simulation.peak_bytes[rank], partition.simulation.events[rank]
    always = sum(load.static_bytes for load in loads[rank::world])
    received = [
        each
        for stage in stages
        for each in (*([] if stage.is_first else stage.inputs), *stage.output_gradients.values())
    ]
    # What was sent is let go at the latest when the next action begins.
    starts = [phase.start_bytes for phase in recording.phases if phase.label]
    return {
        "levels": starts[1:],
        "predicted_levels": [event.after_bytes - always for event in events[:-1]],
        "peak": max(phase.peak_bytes for phase in recording.phases),
        "predicted_peak": peak - always,
        "buffers": sum(buffer.nbytes for each in received for buffer in each if buffer is not None),
        "always": always,
        "in_flight": list(in_flight.values()),
        "recomputed": sum(load.micro_batch.recompute_seconds for load in loads[rank::world]),
    }


@pytest.mark.parametrize(
    ("world", "options", "memory_bytes", "out"),
    [
        (2, PipelineOptions(8, "gpipe", "rotor", [10, 10]), 230_000, 8),
        (3, PipelineOptions(8, "1f1b", "never", [5, 5, 10]), None, 8),
        pytest.param(2, PipelineOptions(8, "1f1b", "always", [10, 10]), None, 96, marks=pytest.mark.wide),
        pytest.param(
            *(2, PipelineOptions(8, "interleaved", "never", [5, 5, 5, 5], stages_per_device=2), None, 8),
            marks=pytest.mark.wide,
        ),
        (2, PipelineOptions(4, "interleaved", "always", [5, 5, 5, 5], stages_per_device=2), None, 8),
    ],
    ids=lambda value: f"{value.schedule}-{value.recompute}" if isinstance(value, PipelineOptions) else str(value),
)
def test_each_process_holds_to_the_byte_what_was_predicted(
    group: Processes, world: int, options: PipelineOptions, memory_bytes: int | None, out: int
) -> None:
    """Only losses, which are the user's, are not foreseen: four bytes for each micro-batch and the gradient of one."""
    found = good(group.run(world, levels, world, options, (memory_bytes,) * world, out))
    for rank, each in enumerate(found):
        losses = 4 * (options.micro_batches + 1) if rank == world - 1 else 0
        pairs = zip(each["levels"], each["predicted_levels"], strict=True)
        assert all(0 <= level - predicted <= losses for level, predicted in pairs), each
        assert 0 <= each["peak"] - each["predicted_peak"] <= losses, each
        assert each["buffers"] == each["always"]
        if options.schedule == "1f1b":
            assert each["in_flight"] == [min(options.micro_batches, world - rank)]
    assert (options.recompute == "never") != any(each["recomputed"] for each in found)


def test_a_process_with_less_memory_recomputes_and_stays_within_it(group: Processes) -> None:
    options, limits = PipelineOptions(8, "1f1b", "rotor", [10, 10]), (112_000, None)
    small, large = good(group.run(2, levels, 2, options, limits, 8))
    assert small["recomputed"] > 0 == large["recomputed"]
    assert small["always"] + small["peak"] <= limits[0]
    assert small["peak"] == small["predicted_peak"]


def counted(rank: int, options: PipelineOptions) -> list[int]:
    """How often layers in the middle of the stages ran first and again in a step."""
    counting = [Counting(), Counting()]
    layers = [nn.Linear(4, 4), counting[0], nn.Linear(4, 4), nn.Linear(4, 4), counting[1], nn.Linear(4, 4)]
    model, x = nn.Sequential(*layers), torch.randn(8, 4)
    calls = split(((x,), {}), sizes_of(8, options.micro_batches))
    made = pipelined(
        model,
        model,
        calls[0],
        options=options,
        kept=lambda tensors: 0,
        processes=PipelineProcesses(torch.device("cpu")),
    )
    made.placement.give_up()
    made.runner.run(made.runner.inputs(calls), lambda output, _: output.sum(), seed=0)  # looks at shapes as well
    counting[rank].taken()
    made.runner.run(made.runner.inputs(calls), lambda output, _: output.sum(), seed=0)
    return counting[rank].taken()


@pytest.mark.parametrize(("recompute", "again"), [("always", 4), ("except_last", 3), ("never", 0)])
def test_modes_recompute_as_often_as_those_of_torchgpipe(group: Processes, recompute: str, again: int) -> None:
    options = PipelineOptions(4, "gpipe", recompute, [3, 3])
    assert good(group.run(2, counted, options)) == [[4, again], [4, again]]


def deferred(rank: int, momentum: float | None, recompute: str) -> float:
    """How far running statistics of a BatchNorm that sees the batch itself are from those of the whole batch, after two steps."""
    model = nn.Sequential(nn.BatchNorm2d(3, momentum=momentum), nn.Conv2d(3, 3, 1), nn.Tanh(), nn.Conv2d(3, 3, 1))
    layer, other = model[0], nn.BatchNorm2d(3, momentum=momentum)
    torch.manual_seed(2)
    batches = [torch.randn(10, 3, 4, 4) * 3 + 1, torch.randn(7, 3, 4, 4)]
    made = pipelined(
        model,
        model,
        split(((batches[0],), {}), sizes_of(10, 4))[0],
        options=PipelineOptions(4, "1f1b", recompute, deferred_batch_norm=True),
        kept=lambda tensors: 0,
        processes=PipelineProcesses(torch.device("cpu")),
    )
    for x in batches:
        other(x)
        made.runner.run(
            made.runner.inputs(split(((x,), {}), sizes_of(len(x), 4))), lambda output, _: output.sum(), seed=0
        )
    if rank:
        return 0.0
    pairs = zip(layer.buffers(), other.buffers(), strict=True)
    return max(float((mine - theirs).abs().max()) for mine, theirs in pairs)


@pytest.mark.parametrize(("momentum", "recompute"), [(0.1, "always"), (None, "never")])
def test_deferred_statistics_are_those_of_whole_batches(
    group: Processes, momentum: float | None, recompute: str
) -> None:
    assert max(good(group.run(2, deferred, momentum, recompute))) <= 1e-5


# -------------------------------------------------------------------------------------------------- evaluation, errors


def evaluated(rank: int, kind: str, balance: Any) -> float:
    """How far the output in evaluation is from that of one process."""
    model, x, _, made = build(kind, PipelineOptions(4, "1f1b", "always", balance))
    other = model_of(kind)[0].eval()
    made.placement.give_up()
    model.eval()
    with torch.no_grad():
        return float((made.evaluate((x,), {}) - other(x)).abs().max())


@pytest.mark.parametrize(
    ("kind", "world", "balance"),
    [
        ("transformer", 2, "auto"),
        pytest.param("unet", 2, "auto", marks=pytest.mark.wide),
        ("unet", 3, [1, 1, 8]),
    ],
)
def test_evaluation_goes_the_way_of_the_models_code(group: Processes, kind: str, world: int, balance: Any) -> None:
    """Also where a pipeline stage has no weights."""
    assert max(good(group.run(world, evaluated, kind, balance))) <= 1e-6


def broken(rank: int, what: str) -> None:
    options, memory_bytes = PipelineOptions(4, "1f1b"), None
    model: nn.Module = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    x: Any = torch.randn(8, 4)
    if what == "few layers":
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    elif what == "shared":
        # One layer in two places, whose running statistics each forward changes.
        model[3] = model[0] = nn.BatchNorm1d(4)
    elif what == "no tensor":
        model = nn.Sequential(nn.Linear(4, 4), Tail(0), Tail(1), nn.Linear(4, 4))
        options = PipelineOptions(4, "1f1b", balance=[2, 1, 1])
    elif what == "balance":
        options = PipelineOptions(4, "1f1b", balance=[3, 2, 1])
    else:
        memory_bytes = 300
    call = split(((x,), {}), sizes_of(8, 4))[0]
    pipelined(
        model,
        model,
        call,
        options=options,
        memory_bytes=memory_bytes,
        kept=lambda tensors: 0,
        processes=PipelineProcesses(torch.device("cpu")),
    )


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("few layers", PipelineError, "use fewer devices"),
        ("shared", PipelineError, "stages 0 and [1-3] share the buffer '0.running_mean', which a forward writes"),
        ("no tensor", PipelineError, "hands over int: expected tensors"),
        ("balance", PipelineError, "balance=\\[2, 1, 1\\]"),
        ("memory", PartitionError, "expected at least"),
    ],
)
def test_what_cannot_be_a_pipeline_is_refused_on_every_process(
    group: Processes, what: str, kind: type[Exception], message: str
) -> None:
    for answer in group.run(3, broken, what):
        assert isinstance(answer, Failure)
        assert answer.kind == kind.__name__, answer.text
        assert re.search(message, answer.message), answer.message


# -------------------------------------------------------------------------------------------------- micro-batches


def test_micro_batches_are_as_equal_as_can_be() -> None:
    assert [sizes_of(rows, 4) for rows in (8, 10, 3, 1)] == [(2, 2, 2, 2), (3, 3, 2, 2), (1, 1, 1), (1,)]


def test_a_batch_is_split_along_its_rows_and_put_together_again() -> None:
    batch = {"x": torch.arange(10).view(5, 2), "scale": torch.tensor(3.0), "name": "n"}
    parts = split(batch, (3, 2))
    assert [len(part["x"]) for part in parts] == [3, 2]
    assert torch.equal(join(parts)["x"], batch["x"])
    assert parts[1]["scale"] == 3
    assert parts[1]["name"] == "n"


@pytest.mark.parametrize("batch", [3, (torch.ones(2, 1), torch.ones(3, 1)), torch.tensor(1.0)])
def test_a_batch_without_rows_is_refused(batch: Any) -> None:
    with pytest.raises(PipelineError, match="expected tensors that all have one row for each sample"):
        rows_in(batch)


class AsksForRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 1000:
            raise ValueError("too many rows")
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_forward_that_asks_for_its_number_of_rows_is_cut_for_that_number() -> None:
    x = torch.randn(24, 6)
    cut = cut_for_rows(AsksForRows(), (x,), {})
    assert len(cut.stages) == 3
    assert cut.bind((x,), {}) is not None
    assert cut.bind((x[:23],), {}) is None
