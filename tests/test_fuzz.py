"""Random programs train to the same bits with the library as without it, or are refused (benchmarks/fuzz.py), and what once failed does, too."""

from __future__ import annotations

import threading
from itertools import product
from typing import Any

import pytest

from benchmarks.fuzz import draw, judge, parse
from benchmarks.fuzz_objects import CONTENTS, HOLDERS
from lightning_rotor.private.torch_names import is_profiling
from tests.grids import few

SEED, PROGRAMS, CHUNK = 1, 200, 10
# Programs over several processes have tests of their own.
NUMBERS = [number for number in range(300) if draw(SEED, number).way in ("callback", "checkpointable")][:PROGRAMS]


# What random programs do, tests by themselves do, too; what they have found is below.
@pytest.mark.parametrize("first", few(range(0, PROGRAMS, CHUNK)))
def test_programs_train_to_the_same_bits_or_are_refused(first: int) -> None:
    for number in NUMBERS[first : first + CHUNK]:
        program = draw(SEED, number)
        verdict = judge(program)
        assert not verdict.failed, f"{number}: {program}\n{verdict}\n{verdict.trace}"
        assert not verdict.silently_over, f"{number}: {program}\n{verdict}"


# What the fuzzer found, shrunk.
REGRESSIONS = {
    "a hook that collects features for the loss": "body=(collecting_hook(linear), gelu), limit=None, seed=1",
    "a hook that notes outputs": "body=(linear, append_hook(linear)), limit=None, features=('records_in_loss',), seed=1",
    "a hook with a state": "body=(counting_hook(linear), linear), way='callback', limit=None, steps=3, seed=1",
    "a hook that removes itself": "body=(once_hook(linear), linear), limit=None, seed=1",
    "a hook on gradients": "body=(linear, gradient_hook(linear), linear), limit=None",
    "a hook on the backward": "body=(backward_hook(linear), linear), limit=None, seed=1",
    "a hook on all modules": "body=(linear, relu, linear), limit=None, features=('global_hook',), seed=1",
    "a growing list": "body=(growing_list, linear, growing_list), style='traced', limit=None",
    "a counter that the forward reads": "body=(uses_count, linear), style='recorded', limit=None, seed=1",
    "tensors that are no buffers": "body=(average, linear, average), limit=None, steps=3",
    "generators of the user's own": "body=(own_generator, linear), way='callback', limit=None, seed=1",
    "a metric": "body=(metric, linear), way='callback', limit=None, features=('log',), seed=1",
    "logging in a layer": "body=(logging, linear), way='callback', limit=None, features=('log', 'unnamed')",
    "logging where nothing is recomputed": "body=(logging,), way='callback', limit=2.0",
    "the input overwritten": "body=(add_, linear, tanh), limit=None, features=('overwrite_input',)",
    "a bias changed before the backward": "body=(linear, linear, tanh), limit=None, features=('edit_bias',)",
    "an optimizer toggled behind the forward": (
        "body=(norm, norm, linear, linear), way='callback', limit=None, features=('two_optimizers', 'stem')"
    ),
    "an input that hooks for saved tensors hand back as it is": (
        "body=(twice(linear, add_), dropout, bernoulli, linear, linear, dropout, drop_path, norm, linear), limit=None, "
        "features=('overwrite_input', 'offload'), steps=1, seed=679"
    ),
    "a refusal while a part of the model evaluates": (
        "body=(linear,), way='callback', features=('eval_call', 'thaw', 'unnamed'), seed=415"
    ),
    "a jagged tensor in a layer that the scan has skipped": (
        "body=(norm, collecting_hook(linear), python_noise, stochastic_depth(row(own_generator, jagged, odd_attributes))), "
        "limit=None, features=('adamw', 'validation', 'error', 'metric', 'stem', 'calls_vary'), steps=3, seed=38"
    ),
    "logs of one micro-batch": (
        "body=(linear, linear, changing_hook(prelu), row(add_, prelu, linear), linear, linear), way='pipeline', limit=None, "
        "features=('clip', 'log', 'stem', 'gpipe', 'always'), batch=48, seed=668"
    ),
    "a recorded pipeline behind layers, which evaluates": (
        "body=(linear, relu, linear), way='pipeline', style='recorded', features=('stem', 'validation'), batch=48"
    ),
    "logs of a pipeline in double precision": (
        "body=(linear, relu, linear), way='pipeline', features=('64-true', 'stem', 'log'), batch=6"
    ),
    "a length planned from another one": (
        "body=(relu, relu, gelu), family='sequence', limit=None, features=('lengths', 'validation'), steps=4, seed=987"
    ),
    "quantized weights that move when training is over": (
        "body=(linear, quantized, linear), way='callback', style='traced', limit=2.0, features=('accumulate', 'uneven'), seed=418"
    ),
    "quantized weights of a model that cannot be copied for a dry run": (
        "body=(quantized, own_generator, method_tensor), way='callback', limit=None, features=('manual', 'bf16-true', 'unnamed'), width=6, seed=613"
    ),
    "quantized weights that learn, and move with their gradients": (
        "body=(quantized, linear), way='callback', style='traced', limit=0.61, features=('accumulate', 'error', 'thaw'), seed=812"
    ),
    "a generator of the user's own beside a thread that draws": (
        "body=(append_hook(layerdrop(prelu)), own_generator), features=('prefetch',), width=4, batch=3, seed=200"
    ),
    "a layer whose changing attribute has the name of a method that others call": "body=(linear, average, linear), style='traced', limit=0.0",
    "a metric in one of several planned modules": (
        "body=(layerdrop(residual(metric, linear), row(prelu, linear)), own_parameter, clone_mul_), way='callback', family='image', limit=1.0, "
        "features=('metric', 'stem', 'unnamed', 'foreach'), batch=3, seed=851"
    ),
    "a step measured while torch's checkpoint runs a layer again": (
        "body=(odd_attributes, checkpointed(view, once_hook(linear), residual(default_array)), average), way='callback', style='recorded', "
        "features=('adamw', 'metric', 'edit_weights', 'unnamed', 'pair_output', 'calls_vary'), steps=4, seed=381"
    ),
    "a minimum of the last batch, which is smaller than those before": (
        "body=(weight_norm, property_array, dropout), way='callback', style='recorded', family='sequence', limit=0.31, "
        "features=('accumulate', 'uneven', 'log', 'stem', 'pair_output'), batch=48, steps=3, seed=987"
    ),
}


# The first program over several processes starts them, which takes as long as all others. What was found in such programs is
# tested where pipelines are.
SEVERAL_PROCESSES = {name for name, program in REGRESSIONS.items() if "way='pipeline'" in program}
# Of those that take longest, a checkpoint of torch's has tests of its own, and a metric another program here.
LONG = {"a step measured while torch's checkpoint runs a layer again", "a metric in one of several planned modules"}


@pytest.mark.parametrize("name", few(REGRESSIONS, *(set(REGRESSIONS) - SEVERAL_PROCESSES - LONG)))
def test_what_the_fuzzer_found_stays_mended(name: str) -> None:
    verdict = judge(parse(f"Program({REGRESSIONS[name]})"))
    assert not verdict.failed, f"{verdict}\n{verdict.trace}"
    assert not any("answer: none" in step for step in verdict.over), verdict
    assert not is_profiling()


@pytest.mark.parametrize("seed", few([79, 80], 79))
def test_layers_skipped_by_chance_beside_a_thread_that_waits(seed: int) -> None:
    """What each run draws from is a draw itself, and what others draw from must be left alone."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait, daemon=True)
    thread.start()
    try:
        for body in (
            "linear, layerdrop(dropout, relu), linear",
            "linear, layerdrop(dropout, noise, numpy_noise), linear, stochastic_depth(python_noise)",
        ):
            verdict = judge(parse(f"Program(body=({body}), limit=None, width=4, batch=12, steps=3, seed={seed})"))
            assert verdict.kind == "equal", f"{verdict}\n{verdict.trace}"
    finally:
        over.set()
        thread.join()


def _cells() -> list[Any]:
    """All cells of the table; ``make test`` runs a sixth of each row and of each column."""
    cells = product(
        enumerate(HOLDERS), enumerate(each for each in CONTENTS if each != "written")
    )  # plain autograd minds
    return [
        pytest.param(holder, content, marks=[] if (row + column) % 6 == 0 else pytest.mark.wide)
        for (row, holder), (column, content) in cells
    ]


@pytest.mark.parametrize(("holder", "content"), _cells())
def test_what_layers_read_may_change_before_the_backward(holder: str, content: str) -> None:
    """As behind a ``with`` around the forward: a recomputation of layers that are not recorded reads what their forward read."""
    verdict = judge(
        parse(
            f"Program(body=(linear, {holder}_{content}, by_value, linear, {holder}_{content}, by_value, linear), limit=None, steps=2, "
            "batch=24, features=('change_early',), seed=1)"
        )
    )
    assert verdict.kind == "equal", f"{verdict}\n{verdict.trace}"
    assert verdict.recomputed


def test_a_program_is_its_text() -> None:
    for number in range(100):
        program = draw(SEED, number)
        assert parse(repr(program)) == program == draw(SEED, number)


def test_a_last_step_beyond_the_limit_is_told() -> None:
    """With two batches to a step of the optimizer, and no more of them, no step follows that could take less."""
    body = "body=(tagged, tanh), way='callback', features=('accumulate', 'log', 'stem', 'fused'), batch=3, seed=253"
    verdict = judge(parse(f"Program({body})"))
    assert verdict.kind == "equal"
    assert not verdict.over
    assert any("the last step of this training has taken" in each for each in verdict.warnings)
