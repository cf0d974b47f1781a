"""Where graphs are cut."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_rotor.capture import boundaries
from lightning_rotor.capture.boundaries import MOST_STAGES, thinned
from lightning_rotor.capture.sequentialize import sequentialize
from lightning_rotor.planning import plan
from lightning_rotor.profiling import profile_chain
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate

WIDTH = 16


class Block(nn.Module):
    """A block of a transformer without attention, whose shortcut goes around all of it."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.rise = nn.Linear(width, 4 * width)
        self.fall = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, width) to the same."""
        return x + self.drop(self.fall(F.gelu(self.rise(self.norm(x)))))


def names(net: nn.Module, value: torch.Tensor) -> list[str]:
    """Of the stages."""
    return [stage.name for stage in sequentialize(net, (value,)).stages]


def test_a_block_is_cut_between_the_operations_that_save_something() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block())
    # The addition saves nothing. Two values are alive before it and one behind it, so it belongs to what is before.
    inside = ["norm", "rise", "gelu", "fall … 1.add"]
    assert names(net, torch.randn(4, WIDTH)) == ["0", *(f"1.{name}" for name in inside), *_of_block(2, inside)]


def _of_block(number: int, inside: list[str]) -> list[str]:
    return [f"{number}.{name.replace('1.add', f'{number}.add')}" for name in inside]


def test_dropout_saves_its_mask_and_is_cut_off() -> None:
    found = names(nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(dropout=0.5)), torch.randn(4, WIDTH))
    assert found == ["0", "1.norm", "1.rise", "1.gelu", "1.fall", "1.drop … 1.add"]


def test_a_sequential_of_layers_is_cut_between_them_without_any_recording() -> None:
    cut = sequentialize(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2))), (torch.ones(1, 2),))
    assert (cut.way, dict(cut.reasons), len(cut.stages)) == ("sequential", {}, 3)


def test_a_sequential_of_blocks_is_cut_inside_them_and_says_so() -> None:
    cut = sequentialize(nn.Sequential(nn.ReLU(), Block(), Block()), (torch.randn(4, WIDTH),))
    assert (cut.way, len(cut.stages)) == ("graph", 9)
    assert cut.reasons == {"sequential": "there are several layers in '1', between which a graph can be cut"}


class Undecided(nn.Module):
    """What it does depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, width) to the same."""
        return self.left(x) if x.sum() > 0 else self.right(x)


def test_a_sequential_of_blocks_that_cannot_be_recorded_is_cut_between_them() -> None:
    cut = sequentialize(nn.Sequential(Undecided(), nn.ReLU(), Undecided()), (torch.randn(4, WIDTH),))
    assert (cut.way, len(cut.stages)) == ("sequential", 3)
    assert "cannot be recorded" in cut.reasons["graph"]


def test_torchs_transformer_layers_are_cut_inside() -> None:
    net = nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True) for _ in range(2)))
    cut = sequentialize(net, (torch.randn(2, 5, WIDTH),))
    assert cut.way == "graph"
    assert [stage.name for stage in cut.stages if stage.name.startswith("1.")] == [
        "1.self_attn.linear",
        "1.self_attn.scaled_dot_product_attention",
        "1.self_attn.linear (2)",
        "1.dropout1 … 1.add",
        "1.norm1",
        "1.linear1",
        "1.relu",
        "1.dropout",
        "1.linear2",
        "1.dropout2 … 1.add",
        "1.norm2",
    ]


def test_a_plan_inside_blocks_costs_less_than_one_between_them() -> None:
    net = nn.Sequential(nn.Linear(64, 64), *(Block(64) for _ in range(6)))
    value = torch.randn(256, 64, requires_grad=True)
    cut = sequentialize(net, (value,))
    chain = profile_chain(cut.stages, cut.bind((value,), {})).chain
    peak = simulate(chain, Schedule.keep_all(len(chain))).peak_bytes
    inside = plan(chain, int(0.6 * peak))
    assert len(chain) == 25
    # What people write by hand: the first blocks are recomputed.
    blocks = [f"({first}-{first + 3})" for first in range(1, 25, 4)]
    for recomputed in range(1, 6):
        text = " ".join(["0", *blocks[:recomputed], f"{4 * recomputed + 1}-24"])
        by_hand = simulate(chain, Schedule.parse(text))
        assert by_hand.peak_bytes > inside.peak_bytes or by_hand.seconds > inside.simulation.seconds


@pytest.mark.parametrize("seed", range(40))
def test_thinning_keeps_some_of_the_cuts_and_no_more_than_wanted(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    weights = [rng.choice((0, 1, 5, 1_000, 100_000)) for _ in range(rng.randint(1, 60))]
    cuts = sorted(rng.sample(range(1, len(weights)), rng.randint(0, len(weights) - 1)))
    monkeypatch.setattr(boundaries, "MOST_STAGES", rng.randint(1, 20))
    found = thinned(cuts, weights)
    assert found == sorted(set(found) & set(cuts))
    assert len(found) < boundaries.MOST_STAGES
    if len(cuts) < boundaries.MOST_STAGES:
        heavy = sum(weights) / 4096
        lost = set(cuts) - set(found)
        stages = list(zip((0, *cuts), (*cuts, len(weights)), strict=True))
        light = {place for start, end in stages if sum(weights[start:end]) < heavy for place in (start, end)}
        assert lost <= light


def test_deep_models_get_no_more_stages_than_a_planner_is_quick_for() -> None:
    net = nn.Sequential(*(Block(4) for _ in range(MOST_STAGES // 2)))
    assert len(names(net, torch.randn(2, 4))) == MOST_STAGES
