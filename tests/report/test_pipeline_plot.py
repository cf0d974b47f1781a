"""Pictures of pipelines: what is in them, not how they look."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("matplotlib")

from lightning_rotor.pipeline.partition import partition
from lightning_rotor.pipeline.pipeline_schedule import orders
from lightning_rotor.pipeline.pipeline_simulator import simulate_pipeline
from lightning_rotor.pipeline.stage_loads import MicroBatchLoad, PipelineStageLoad
from lightning_rotor.report.figures import PHASE_COLOURS, PlotError
from lightning_rotor.report.pipeline_plot import plot_pipeline
from tests.strategies import random_chain

# Nothing of a pipeline's stages is moved, so that nothing waits for a copy.
COLOURS = [colours for phase, colours in PHASE_COLOURS.items() if phase != "wait"]


def simulated(devices=2, micro_batches=3, stages=1, again=1.0, held=0):
    load = PipelineStageLoad(
        MicroBatchLoad(1, 3, again, held_bytes=held, forward_peak_bytes=held, backward_peak_bytes=held)
    )
    order = orders("interleaved", devices, micro_batches=micro_batches, stages_per_device=stages)
    return simulate_pipeline(order, [load] * (devices * stages), micro_batches=micro_batches)


def bars(axes):
    """Bars in milliseconds by colour; those of the legend have no width or height of their own."""
    from matplotlib.colors import to_hex

    found = {}
    for bar in axes.patches:
        if bar.get_width() and bar.get_height():
            span = (round(bar.get_y() + bar.get_height() / 2), bar.get_x(), bar.get_x() + bar.get_width())
            found.setdefault(to_hex(bar.get_facecolor()).upper(), []).append(span)
    return found


def test_every_action_is_a_bar_with_its_recomputation_first():
    simulation = simulated()
    (axes,) = plot_pipeline(simulation).axes
    found = bars(axes)
    assert {colour: len(spans) for colour, spans in found.items()} == {full: 6 for full, _ in COLOURS}
    events = [each for device in simulation.events for each in device]
    forwards = {(each.device, each.start_seconds, each.end_seconds) for each in events if each.action.work == "forward"}
    assert set(found[PHASE_COLOURS["forward"][0]]) == forwards
    again = {(each.device, each.start_seconds, each.start_seconds + 1) for each in events if each.recompute_seconds}
    assert set(found[PHASE_COLOURS["recompute"][0]]) == again


def test_bars_carry_the_number_of_their_micro_batch():
    (axes,) = plot_pipeline(simulated(again=0.0)).axes
    assert sorted(text.get_text() for text in axes.texts) == sorted("0123"[:3] * 4)
    assert axes.figure.legends[0].get_title().get_text() == "16 s per step, 25.0% bubble"


def test_later_stages_of_a_device_are_paler():
    (axes,) = plot_pipeline(simulated(stages=2, micro_batches=4)).axes
    assert set(bars(axes)) == {colour for colours in COLOURS for colour in colours}


def test_memory_is_drawn_below_with_the_limit():
    chain = random_chain(random.Random(1), 10, "cnn", grain=2**20)
    free = partition(chain, 2, micro_batches=4)
    found = partition(chain, 2, micro_batches=4, memory_bytes=max(free.simulation.peak_bytes))
    _, below = plot_pipeline(found).axes
    highest = [max(line.get_ydata()) for line in below.lines]
    assert highest[:2] == pytest.approx([peak / 2**20 for peak in found.simulation.peak_bytes])
    assert highest[2] == pytest.approx(max(free.simulation.peak_bytes) / 2**20)
    assert len(plot_pipeline(simulated()).axes) == 1


def test_many_devices_are_drawn_thinly(tmp_path):
    simulation = simulated(devices=24, micro_batches=24, held=5)
    axes, below = plot_pipeline(simulation, title="many").axes
    assert not axes.texts
    assert len(axes.get_yticks()) <= 16
    assert len(below.lines) == 4
    highest = max(simulation.peak_bytes)
    assert max(max(line.get_ydata()) for line in below.lines) == highest
    figure = axes.figure
    figure.savefig(tmp_path / "many.png")
    assert figure.legends[0].get_title().get_text() == "many"


def test_nothing_to_draw_is_refused():
    load = PipelineStageLoad(MicroBatchLoad(0, 0))
    with pytest.raises(PlotError, match="nothing to draw"):
        plot_pipeline(simulate_pipeline(orders("1f1b", 1, micro_batches=1), [load], micro_batches=1))
