"""Ways to train on several devices: bytes and seconds that were computed by hand, what is left out, and bad input."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from lightning_rotor.advising.advice import Advice, advise
from lightning_rotor.advising.blocks import blocks_of
from lightning_rotor.advising.choice import Choice
from lightning_rotor.advising.cluster import Cluster
from lightning_rotor.advising.model_costs import Precision, SpreadParameters, model_costs
from lightning_rotor.advising.sharded_models import sharded_models, unit_sizes
from lightning_rotor.advising.sharded_step import sharded_step
from lightning_rotor.advising.task import Task
from lightning_rotor.advising.whole_models import exposed_seconds
from lightning_rotor.errors import AdviceError
from lightning_rotor.pipeline.partition import Link
from lightning_rotor.private.sharding import UnitSizes
from lightning_rotor.profiling.accelerators import GPUS
from lightning_rotor.profiling.input_spec import InputSpec
from lightning_rotor.report.command_line import main
from lightning_rotor.simulator import Event
from tests.processes import ROOT

WIDTH, DEPTH = 64, 3


class Blocks(nn.Module):
    """Equal blocks, which are no ``nn.Sequential``, and a head."""

    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(depth)
        )
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class OneBlock(Blocks):
    """A single one, where their number does not matter."""

    def __init__(self) -> None:
        super().__init__(depth=1)


class Tied(nn.Module):
    """The first and the last layer have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.middle(self.first(x).tanh()).tanh(), self.first.weight)


def asked(
    make: type[nn.Module] = Blocks,
    devices: int = 4,
    batch: int = 64,
    samples: int = 8,
    nodes: int = 1,
    **options: object,
) -> Advice:
    return advise(
        make,
        [InputSpec((samples, WIDTH))],
        lambda model: [torch.optim.AdamW(model.parameters())],
        Cluster.of("H100", devices, nodes),
        batch=batch,
        **options,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def advice() -> Advice:
    return asked()


def of_kind(advice: Advice, kind: str) -> list[Choice]:
    return [choice for choice in advice.choices if choice.kind == kind]


@pytest.fixture(scope="module")
def parameter_bytes() -> int:
    return 4 * sum(parameter.numel() for parameter in Blocks().parameters())


def test_the_buckets_of_ddp_hold_all_gradients_once_more(advice: Advice, parameter_bytes: int) -> None:
    (single,) = of_kind(asked(devices=1, batch=16), "one device")
    (ddp,) = of_kind(advice, "DDP")
    assert ddp.batch_per_device == single.batch_per_device == 16
    assert ddp.peak_bytes - single.peak_bytes == parameter_bytes


def test_sharing_parameters_saves_their_share(advice: Advice, parameter_bytes: int) -> None:
    kept, given_up = (of_kind(advice, "FSDP2")[index] for index in (0, 1))
    if given_up.reshard is False:
        kept, given_up = given_up, kept
    assert (kept.reshard, given_up.reshard) == (False, True)
    assert given_up.peak_bytes < kept.peak_bytes < of_kind(advice, "DDP")[0].peak_bytes
    # Parameters of all blocks but the last one stay, of which the backward needs them at once.
    block_bytes = 4 * 2 * (WIDTH * WIDTH + WIDTH)
    assert kept.peak_bytes - given_up.peak_bytes <= (DEPTH - 1) * block_bytes


def test_ways_come_fastest_first_with_their_lines(advice: Advice) -> None:
    seconds = [choice.seconds.total for choice in advice.choices]
    assert seconds == sorted(seconds)
    assert advice.best is advice.choices[0]
    assert {choice.kind for choice in advice.choices} == {"one device", "DDP", "FSDP2", "pipeline"}
    for choice in advice.choices:
        compile(choice.lines, choice.name, "exec")
    assert (
        dict(advice.left_out)["tensor parallelism"] == "this version does not plan it, and does not estimate it either"
    )


@pytest.mark.wide
def test_the_bubble_of_equal_stages_is_what_the_papers_say() -> None:
    """(p - 1) of (m + p - 1) rounds, with equal stages and messages without seconds."""
    far = Cluster(GPUS["H100"], 4, 1, Link(), Link())

    def equal() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))

    found = advise(equal, [InputSpec((8, WIDTH))], lambda model: [], far, batch=16)
    four = [each for each in of_kind(found, "pipeline") if (each.stages, each.schedule) == (4, "1f1b")]
    (choice,) = four
    rounds = choice.micro_batches + 4 - 1
    # The first layer's backward has no gradient of its input to make, so stages are equal but for that.
    assert choice.seconds.bubble / choice.seconds.total == pytest.approx(3 / rounds, rel=0.15)
    assert f'RotorPipelineStrategy("model", micro_batches={choice.micro_batches}, schedule="1f1b"' in choice.lines


def test_a_limit_below_plain_training_recomputes_units() -> None:
    cluster = Cluster.of("H100", 2)
    costs = model_costs(
        Blocks, [InputSpec((8, WIDTH))], lambda model: [], cluster.gpu, Precision.of("32-true"), batch_size=512
    )
    plain = sharded_models(Task(costs, cluster, 1024, 2**30, "32-true", "1GiB"))
    limit = int(0.9 * min(choice.peak_bytes for choice in plain))
    tight = sharded_models(Task(costs, cluster, 1024, limit, "32-true", str(limit)))
    assert not any(choice.recomputed for choice in plain)
    assert tight
    for choice in tight:
        assert choice.peak_bytes <= limit
        assert choice.recomputed
        assert choice.seconds.recomputation > 0


def test_nothing_fits() -> None:
    with pytest.raises(AdviceError, match=r"nothing fits 2 devices with .* each: expected more devices or memory"):
        asked(OneBlock, devices=2, batch=4, mem_limit="10kB")


@pytest.mark.wide
def test_tied_weights_and_autocast_do_not_speak_against_pipelines() -> None:
    assert of_kind(asked(Tied, devices=2), "pipeline")
    assert of_kind(asked(OneBlock, devices=2, precision="bf16-mixed"), "pipeline")


def test_messages_of_gradients_overlap_with_the_backward() -> None:
    events = [Event("forward", 0, 9.0, 0, 0), Event("backward", 1, 4.0, 0, 0), Event("backward", 0, 4.0, 0, 0)]
    assert exposed_seconds(events, [1.0, 3.0]) == pytest.approx(1.0)
    assert exposed_seconds(events, [1.0, 6.0]) == pytest.approx(3.0)


def test_a_sharded_step_holds_a_unit_and_the_messages_around_it() -> None:
    """Two units of 100 bytes over two processes, nothing else; by hand, moment by moment."""
    unit = UnitSizes(gathered_bytes=100, gradient_bytes=100, reduced_bytes=100, shard_bytes=50)
    events = [
        Event("forward", 0, 1.0, 10, 10),
        Event("forward", 1, 1.0, 20, 20),
        Event("backward", 1, 2.0, 120, 110),
        Event("backward", 0, 2.0, 210, 200),
    ]

    def seen(*, reshard: bool) -> tuple[int, float]:
        step = sharded_step(
            events, (0, 1), (unit, unit), UnitSizes(), reshard=reshard,
            gather_seconds=lambda size: 0.01 * size, reduce_seconds=lambda size: 0.01 * size,
        )  # fmt: skip
        assert step.busy_seconds == 6.0
        return step.peak_bytes, step.seconds

    # Backward of unit 0: gradients of both (200), of which one is a shard (-50), parameters (100), the gradients' message
    # of unit 1 (100), and 10.
    assert seen(reshard=True) == (360, pytest.approx(9.0))
    # The parameters of unit 0 are there in the backward of unit 1, too: no message of unit 1 yet, so no higher peak.
    assert seen(reshard=False) == (360, pytest.approx(8.0))


def test_shards_are_padded_to_the_largest() -> None:
    unit = SpreadParameters.of([torch.empty(5, 3), torch.empty(4).requires_grad_()])
    assert unit.shard_bytes(2) == 3 * 12 + 2 * 4
    assert unit_sizes(unit, 2) == UnitSizes(2 * (36 + 8), 16, 16, 8)


def test_blocks_are_the_members_of_the_containers_with_most_parameters() -> None:
    found = blocks_of(Blocks())
    assert found is not None
    assert found.containers == ("layers",)
    assert len(found.modules) == DEPTH
    assert blocks_of(nn.Linear(3, 3)) is None


def test_wrong_questions_are_refused() -> None:
    with pytest.raises(AdviceError, match="batch is 0: expected a positive number of samples"):
        asked(batch=0)
    with pytest.raises(AdviceError, match="precision 'fp8' is unknown: expected 32-true"):
        asked(precision="fp8")
    with pytest.raises(AdviceError, match=r"first dimensions \[2, 3\]: expected one number of samples"):
        advise(Blocks, [InputSpec((2, 2)), InputSpec((3, 2))], lambda model: [], Cluster.of("H100", 2))


def test_the_command_prints_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    model = f"{ROOT / 'tests' / 'test_advice.py'}:OneBlock"
    arguments = ["advise", "--model", model, "--input", f"8x{WIDTH}", "--gpu", "h100", "--devices", "2"]
    assert main([*arguments, "--batch", "32"]) == 0
    printed = capsys.readouterr().out
    assert "32 samples a step on 2 x H100" in printed
    assert "trainer = L.Trainer(" in printed
    assert main([*arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["batch"] == 2 * 8
    assert {"DDP", "FSDP2"} <= {choice["kind"] for choice in answer["choices"]}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--gpu", "H900"], "gpu 'H900' is unknown: expected one of B200"),
        (["--devices", "0"], "devices is 0: expected a positive integer"),
        (["--model", "no_such_package.Net"], "no_such_package cannot be imported"),
    ],
)
def test_the_command_words_wrong_input(changed: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["advise", "--model", "torch.nn.Linear", "--input", "2x2", "--gpu", "H100", "--devices", "2"]
    assert main([*arguments, *changed]) == 2
    assert message in capsys.readouterr().err
