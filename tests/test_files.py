"""Plans are saved, and loaded for what they were made for alone."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_rotor import Checkpointable, Plan, PlanError, profile_chain, sequential_stages
from lightning_rotor.chain import Chain
from lightning_rotor.planning import minimum_budget
from tests.grids import examples
from tests.imported_python import ImportedPython
from tests.strategies import chains, with_skips


def net(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


def chain_for(module: nn.Sequential, sample: torch.Tensor) -> Chain:
    return profile_chain(sequential_stages(module), sample, repeats=1).chain


SAMPLE = torch.zeros(6, 4)


@settings(max_examples=examples(16, 40), deadline=None)
@given(chains(), st.randoms(use_true_random=False), st.booleans())
def test_a_loaded_plan_is_the_saved_one(
    tmp_path_factory: pytest.TempPathFactory, chain: Chain, rng: object, skips: bool
) -> None:
    if skips and len(chain) >= 3:
        chain = with_skips(rng, chain)  # type: ignore[arg-type]
    plan = minimum_budget(chain, slots=40, gradients_exist=skips)
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan.save(path)
    assert replace(Plan.load(path, chain), solve_seconds=plan.solve_seconds) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_a_plan_fits_the_same_model_measured_again_in_another_process(
    tmp_path: Path, imported_python: ImportedPython
) -> None:
    plan = minimum_budget(chain_for(net(), SAMPLE))
    plan.save(tmp_path / "plan.json")
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_files import SAMPLE, Plan, chain_for, net\n"
        f"print(Plan.load({str(tmp_path / 'plan.json')!r}, chain_for(net(), SAMPLE)).schedule)"
    )
    assert imported_python.run(script).strip() == str(plan.schedule)


@pytest.mark.parametrize(
    ("module", "sample", "difference"),
    [
        (net(), torch.zeros(7, 4), r"stage '0' took float32\[6, 4\], and takes float32\[7, 4\]"),
        (net().double(), SAMPLE.double(), r"stage '0' took float32\[6, 4\], and takes float64\[6, 4\]"),
        (net(16), SAMPLE, r"output_bytes of stage '0' was 192, and is 384"),
        (net()[:4], SAMPLE, r"stage 4 was '4' of 5, and is no such stage of 4"),
        (nn.Sequential(*net(), nn.Tanh()), SAMPLE, r"stage 5 was no such stage of 5, and is '5' of 6"),
    ],
    ids=["shape", "dtype", "width", "shorter", "longer"],
)
def test_another_model_shape_or_dtype_is_refused(
    tmp_path: Path, module: nn.Sequential, sample: torch.Tensor, difference: str
) -> None:
    minimum_budget(chain_for(net(), SAMPLE)).save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match=difference):
        Plan.load(tmp_path / "plan.json", chain_for(module, sample))


def test_a_plan_for_a_shape_that_was_not_measured_says_for_which(tmp_path: Path) -> None:
    run = Checkpointable(net(), torch.zeros(64, 4), "1MiB")
    run(torch.zeros(1, 4)).sum().backward()
    assert run.plan is not None
    run.plan.save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match=r"stage '0' took float32\[1, 4\], and takes float32\[6, 4\]"):
        Plan.load(tmp_path / "plan.json", chain_for(net(), SAMPLE))
    with pytest.raises(PlanError, match=r"at float32\[1, 4\] was estimated from other shapes, and is measured"):
        Plan.load(tmp_path / "plan.json", chain_for(net(), torch.zeros(1, 4)))


def test_half_precision_of_two_kinds_is_told_apart(tmp_path: Path) -> None:
    minimum_budget(chain_for(net().half(), SAMPLE.half())).save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match=r"took float16\[6, 4\], and takes bfloat16\[6, 4\]"):
        Plan.load(tmp_path / "plan.json", chain_for(net().bfloat16(), SAMPLE.bfloat16()))


def test_another_device_or_another_option_is_refused(tmp_path: Path) -> None:
    chain = chain_for(net(), SAMPLE)
    minimum_budget(chain).save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="device 'cpu', and this chain was measured on 'cuda:0'"):
        Plan.load(tmp_path / "plan.json", replace(chain, device="cuda:0"))
    first, *others = chain.stages
    more = replace(first, options=(first.keep, replace(first.keep, name="selective")))
    with pytest.raises(PlanError, match=r"options of stage '0' was .*, and is .*selective"):
        Plan.load(tmp_path / "plan.json", replace(chain, stages=(more, *others)))


def test_timings_and_workspaces_of_another_machine_do_not_matter_unless_the_budget_is_exceeded(tmp_path: Path) -> None:
    chain = chain_for(net(), SAMPLE)
    minimum_budget(chain).save(tmp_path / "plan.json")
    slower = [replace(stage, discard_seconds=1.0) for stage in chain]
    assert Plan.load(tmp_path / "plan.json", replace(chain, stages=tuple(slower))).chain.stages[0].discard_seconds == 1
    hungry = [
        replace(stage, options=(replace(stage.keep, backward_peak_bytes=10**6, backward_held_peak_bytes=10**6),))
        for stage in chain
    ]
    with pytest.raises(PlanError, match=r"on this machine, which is more than its budget of .*: plan anew"):
        Plan.load(tmp_path / "plan.json", replace(chain, stages=tuple(hungry)))


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"format": 1, "stages": 3}', '{"format": 1, "stages": [{}]}'),
        '{"format": 1, "stages": [], "fingerprint": "", "device": "cpu"}',
    ],
)
def test_a_file_that_holds_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match=r"plan.json holds no plan .*: expected a file that Plan.save has written"):
        Plan.load(tmp_path / "plan.json", chain_for(net(), SAMPLE))


def test_another_format_or_a_changed_file_is_refused(tmp_path: Path) -> None:
    chain, path = chain_for(net(), SAMPLE), tmp_path / "plan.json"
    minimum_budget(chain).save(path)
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"fingerprint": "0" * 16}))
    with pytest.raises(PlanError, match="the file was changed after it was written"):
        Plan.load(path, chain)
    path.write_text(json.dumps(content | {"schedule": "0 2"}))
    with pytest.raises(PlanError, match="stage 2 follows stage 0"):
        Plan.load(path, chain)
    path.write_text(json.dumps(content | {"format": 3}))
    with pytest.raises(PlanError, match="has format 3: expected 1 or 2"):
        Plan.load(path, chain)
