"""Drawings of chains: what is in them, what is drawn once, and that every stage is a box in one column."""

from __future__ import annotations

import itertools
import random
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_rotor import Checkpointable, sequentialize
from lightning_rotor.chain import Chain, Skip
from lightning_rotor.errors import ProfilingError, ScheduleError
from lightning_rotor.profiling import profile_chain
from lightning_rotor.report.drawing import draw_chain
from lightning_rotor.report.operator_labels import operator_labels
from lightning_rotor.report.repeats import Run, folded, stage_keys
from lightning_rotor.schedule import Schedule
from lightning_rotor.stages.sequential import Stage, sequential_stages
from tests.strategies import chains, random_chain, with_skips

SVG = "{http://www.w3.org/2000/svg}"


def parsed(text: str) -> ET.Element:
    return ET.fromstring(text)


def texts(text: str) -> list[str]:
    """Lines of the picture."""
    lines: dict[str, str] = {}
    for element in parsed(text).iter(f"{SVG}text"):
        y = element.get("y", "")
        lines[y] = lines.get(y, "") + "".join(element.itertext()).replace("\xa0", " ")
    return [line.strip() for line in lines.values()]


def boxes(text: str) -> list[str]:
    """Names in the upper edges of boxes."""
    return [line.strip("│╭╮─ ") for line in texts(text) if re.match("│?╭─ [^─]", line)]


def right_edges(text: str) -> set[float]:
    """Where boxes end on the right."""
    ends = [each for each in parsed(text).iter(f"{SVG}text") if "".join(each.itertext())[-1:] in "│╮╯"]
    return {round(float(each.get("x", 0)) + float(each.get("textLength", 0)), 3) for each in ends if each.text != "\n"}


def words(text: str) -> str:
    """All lines, without edges."""
    return " | ".join(line.strip("│╭╮╰╯─ ") for line in texts(text))


def repeated(chain: Chain, times: int) -> Chain:
    """The same stages several times, under other names."""
    stages = [replace(stage, name=f"blocks.{block}.{stage.name}") for block in range(times) for stage in chain.stages]
    return replace(chain, stages=tuple(stages), skips=())


# ---------------------------------------------------------------------------------------------------- folding


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("", []),
        ("a", [Run(0, 1, 1)]),
        ("aaaa", [Run(0, 1, 4)]),
        ("xabababy", [Run(0, 1, 1), Run(1, 2, 3), Run(7, 1, 1)]),
        ("aabaab", [Run(0, 3, 2)]),
        ("abcabd", [Run(number, 1, 1) for number in range(6)]),
    ],
)
def test_what_repeats_is_a_run(text: str, runs: list[Run]) -> None:
    assert folded(text) == runs


@given(st.lists(st.integers(0, 2), max_size=40))
def test_runs_unfold_to_what_was_folded(keys: list[int]) -> None:
    unfolded = [keys[run.first : run.first + run.length] * run.repeats for run in folded(keys)]
    assert list(itertools.chain.from_iterable(unfolded)) == keys


def test_stages_are_equal_if_all_but_names_and_times_is() -> None:
    chain = random_chain(random.Random(0), 3, "transformer", grain=512)
    slower = replace(chain.stages[1], name="other", discard_seconds=9.0)
    larger = replace(chain.stages[2], output_bytes=1)
    keys = stage_keys(replace(chain, stages=(chain.stages[1], slower, larger)), [()] * 3)
    assert keys[0] == keys[1] != keys[2]
    assert len(set(stage_keys(chain, ["a", "b", "c"]))) == 3


# ---------------------------------------------------------------------------------------------------- operators


def test_operators_of_layers_say_their_sizes() -> None:
    net = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.ReLU()),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Embedding(10, 4),
        nn.Linear(4, 2),
        nn.MultiheadAttention(8, 2),
    )
    whole = Stage("", (net[0],))
    assert operator_labels(whole) == ("Conv2d 8×3×3×3", "BatchNorm2d 8", "ReLU (×2)")
    singles = [label for stage in sequential_stages(net)[4:] for label in operator_labels(stage)]
    assert singles == ["Conv2d 8×1×3×3", "Embedding 10×4", "Linear 2×4", "MultiheadAttention"]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 8) + torch.tanh(self.linear(x)).view(x.shape)


def test_operators_of_a_graph_are_those_that_compute() -> None:
    assert operator_labels(Stage("", (Residual(),))) == ("Residual",)
    cut = sequentialize(Whole(), (torch.ones(2, 8),))
    of_stages = [operator_labels(stage) for stage in cut.stages]
    assert all("view" not in each for each in of_stages if len(each) > 1)
    labels = [label for each in of_stages for label in each]
    assert labels.count("tanh") == labels.count("add") == labels.count("Linear 8×8") == 2


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Residual(), Residual()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


# ---------------------------------------------------------------------------------------------------- the drawing


def test_a_drawing_shows_names_operators_boundaries_and_what_is_kept() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    profile = profile_chain(sequential_stages(net), torch.randn(4, 3, 8, 8), repeats=1)
    shown = words(draw_chain(profile.chain, profile.stages, title="A <net> & more"))
    assert shown.startswith("A <net> & more | 3 stages · input 3.00 KiB | 0 | Conv2d 8×3×3×3")
    assert "keeps 3.00 KiB | ▼ 4.50 KiB" in shown
    assert "Linear 10×288" in shown
    assert shown.endswith("▼ output 160 B")


def test_equal_stages_share_a_colour_and_repeat_once() -> None:
    chain = repeated(random_chain(random.Random(3), 3, "heterogeneous", grain=4096), 12)
    picture = draw_chain(chain)
    assert len(boxes(picture)) == 3
    assert "× 12" in words(picture)
    assert len(boxes(draw_chain(chain, fold=False))) == 36
    colours = {box.get("fill") for box in parsed(draw_chain(chain, fold=False)).iter(f"{SVG}rect")}
    assert len(colours - {"white", None}) == 3
    alone = random_chain(random.Random(3), 3, "heterogeneous", grain=4096)
    assert "equal stages" not in draw_chain(alone)


@given(chains(max_stages=30), st.randoms(use_true_random=False))
def test_every_stage_is_a_box_of_the_same_width(chain: Chain, rng: random.Random) -> None:
    chain = with_skips(rng, chain) if len(chain) > 3 else chain
    picture = draw_chain(chain, fold=False, title="some chain")
    assert len(boxes(picture)) == len(chain) >= len(boxes(draw_chain(chain)))
    assert len(right_edges(picture) - {36.6}) == 1


def test_skips_say_from_where_to_where_they_go() -> None:
    chain = random_chain(random.Random(1), 4, "cnn", grain=512)
    chain = replace(chain, skips=(Skip(0, (2, 3), 2048, (2048, 2048)), Skip(-1, (3,), 0, (0,))))
    names, shown = chain.names, words(draw_chain(chain))
    assert f"skip of 2.00 KiB to {names[2]}, {names[3]}" in shown
    assert shown.count(f"skip from {names[0]}") == 2


def test_a_chain_of_hundreds_of_unlike_stages_is_one_strip() -> None:
    chain = random_chain(random.Random(1), 300, "heterogeneous", grain=512)
    picture = draw_chain(chain)
    assert len(boxes(picture)) == 300
    assert float(parsed(picture).get("width", 0)) < 700


def test_a_schedule_marks_what_is_recomputed() -> None:
    chain = random_chain(random.Random(1), 6, "heterogeneous", grain=512)
    picture = draw_chain(chain, schedule=Schedule.parse("0 ((1-2) 3-4) 5"))
    assert [line.count("twice") for line in texts(picture) if "recomputed" in line][1:] == [1, 1, 0, 0]
    assert "orange" in picture
    assert "orange" not in draw_chain(chain)


def test_the_backward_goes_from_the_last_stage_to_the_first_and_says_what_runs_again() -> None:
    chain = random_chain(random.Random(1), 6, "heterogeneous")
    forward, backward = (
        draw_chain(chain, schedule=Schedule.parse("0 (1-3) 4 5"), backward=way) for way in (False, True)
    )
    assert boxes(backward) == boxes(forward)[::-1] == list(chain.names)[::-1]
    lines = [line for line in words(backward).split(" | ") if "runs again" in line]
    assert lines == [f"runs again first: {chain.names[1]} … {chain.names[3]}"]
    assert words(backward).index(lines[0]) > words(backward).index(chain.names[3])
    assert backward.count("gradient&#160;") >= len(chain)


def test_a_drawing_is_text_that_notebooks_show(tmp_path: Path) -> None:
    drawing = draw_chain(random_chain(random.Random(0), 3, "uniform"))
    assert parsed(drawing._repr_svg_()).tag == f"{SVG}svg"
    drawing.save(tmp_path / "net.svg")
    assert (tmp_path / "net.svg").read_text(encoding="utf-8") == drawing


def test_a_wrapped_module_draws_itself() -> None:
    net = Checkpointable(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    with pytest.raises(ProfilingError, match="nothing has been measured yet: give a sample first"):
        net.draw()
    net.measure(torch.randn(3, 4))
    assert "Linear 2×4" in words(net.draw())
    assert boxes(net.draw(backward=True)) == ["2", "1", "0"]


@pytest.mark.wide
def test_of_resnet101_a_page_is_enough() -> None:
    net = torchvision.models.resnet101(num_classes=10).train()
    images = torch.randn(2, 3, 32, 32)
    cut = sequentialize(net, (images,))
    profile = profile_chain(cut.stages, cut.bind((images,), {}), repeats=1)
    picture = draw_chain(profile.chain, profile.stages)
    assert len(boxes(picture)) < len(profile.chain) / 2
    assert "× " in words(picture)
    assert "Conv2d 64×64×3×3" in words(picture)


def test_stages_and_schedules_of_another_chain_are_refused() -> None:
    chain = random_chain(random.Random(1), 3, "cnn")
    with pytest.raises(ScheduleError, match="2 stages for a chain of 3"):
        draw_chain(chain, sequential_stages(nn.Sequential(nn.Tanh(), nn.Tanh())))
    with pytest.raises(ScheduleError, match="a schedule of 2 stages for a chain of 3"):
        draw_chain(chain, schedule=Schedule.keep_all(2))


# ---------------------------------------------------------------------------------------------------- text


WORDS = ("ReLU", "Conv 3×3 64→64", "add", "B" * 70)


@given(
    st.lists(st.lists(st.sampled_from(WORDS), max_size=20), min_size=1, max_size=4),
    st.lists(st.text(st.characters(codec="ascii", exclude_categories=["C"]), max_size=60), min_size=4, max_size=4),
)
def test_all_text_of_a_box_lies_within_it(stages: list[list[str]], names: list[str]) -> None:
    layers = [nn.Sequential(*(type(word, (nn.Module,), {})() for word in words)) for words in stages]
    chain = random_chain(random.Random(1), len(stages), "cnn")
    chain = replace(
        chain, stages=tuple(replace(stage, name=name) for stage, name in zip(chain.stages, names, strict=False))
    )
    picture = draw_chain(chain, [Stage(name, (layer,)) for name, layer in zip(names, layers, strict=False)], fold=False)
    assert max(map(len, texts(picture))) <= 53


def test_operators_that_do_not_fit_end_in_dots_and_lines_break_between_them() -> None:
    shown = texts(
        draw_chain(
            random_chain(random.Random(1), 1, "cnn"), [Stage("net", tuple(map(nn.Linear, range(1, 31), range(31, 61))))]
        )
    )
    lines = [line.strip("│ ") for line in shown if "Linear" in line]
    assert len(lines) == 4
    assert lines[0] == "Linear 31×1 · Linear 32×2 · Linear 33×3 ·"
    assert lines[-1].endswith("…")
