"""Plans and costs by signature and turn."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_rotor import Checkpointable
from lightning_rotor.planned.cache import PlanCache
from lightning_rotor.planned.measurements import Measurements
from lightning_rotor.planned.other_sizes import best_of, covering, least_overhead_of, lost_by, sizes_around
from lightning_rotor.planned.prepared import Costs, Prepared, costs_of
from lightning_rotor.planned.signature import Signature
from lightning_rotor.planning import minimum_budget, scheduled
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate


def entry_for(rows: int) -> tuple[Signature, Prepared]:
    """A small chain, measured and planned without recomputation."""
    net = Checkpointable(nn.Sequential(*(nn.Linear(8, 8), nn.Tanh()) * 3), torch.randn(rows, 8), show_progress=False)
    chain = net.chain
    assert chain is not None
    net.use(Schedule.keep_all(len(chain)))
    signature, entry = net._planned.plans.cache.latest
    assert isinstance(entry, Prepared)
    return signature, entry


def test_costs_of_one_turn_are_those_of_another_and_its_plan_is_not() -> None:
    cache, (signature, entry) = PlanCache(4), entry_for(4)
    cache.put(signature, entry)
    assert cache.use(signature) is entry
    other = cache.use(signature, ("left",))
    assert isinstance(other, Costs)
    assert other.turn == ("left",)
    assert other.profile is entry.profile


def test_plans_and_signatures_go_separately_and_every_change_ends_the_steady_call() -> None:
    cache, (signature, entry) = PlanCache(4), entry_for(4)
    facts: Any = object()
    cache.put(signature, entry)
    cache.note_last(signature, entry, facts)
    assert cache.steady is not None  # the user has chosen its schedule
    cache.keep_only_plans(lambda plan: False)
    assert cache.steady is None
    assert cache.use(signature) == entry.costs or isinstance(cache.use(signature), Costs)
    assert not list(cache.planned())
    cache.keep_only(lambda _: False)
    assert cache.use(signature) is None


def test_the_signatures_used_last_are_kept() -> None:
    cache, (signature, entry) = PlanCache(1), entry_for(4)
    other, other_entry = entry_for(5)
    cache.put(signature, entry)
    cache.put(other, other_entry)
    assert signature not in cache
    assert cache.latest == (other, other_entry)


def test_sizes_in_between_are_estimated_and_far_ones_are_measured() -> None:
    net = Checkpointable(nn.Sequential(*(nn.Linear(8, 8), nn.Tanh()) * 3), torch.randn(16, 8), show_progress=False)
    plans, measurements = net._planned.plans, Measurements()
    for rows in (16, 24):
        signature, value = plans.signature_and_input((torch.randn(rows, 8),), {})
        measurements.add(signature, plans.measure(signature, value).profile)
    between, _ = plans.signature_and_input((torch.randn(20, 8),), {})
    estimate = measurements.estimate(between)
    assert estimate is not None
    assert estimate.is_near
    truth = plans.measure(between, torch.randn(20, 8)).profile.chain
    assert truth.kept_bytes <= estimate.profile.chain.kept_bytes <= 1.1 * truth.kept_bytes
    far, _ = plans.signature_and_input((torch.randn(64, 8),), {})
    assert measurements.estimate(far) is None
    measurements.keep_only(lambda _: False)
    assert measurements.estimate(between) is None


def test_a_new_size_takes_the_fastest_schedule_that_fits() -> None:
    from lightning_rotor.memory.budget import Budget

    _, entry = entry_for(64)
    chain = entry.profile.chain
    least, keep_all = minimum_budget(chain), Schedule.keep_all(len(chain))
    most = simulate(chain, keep_all).peak_bytes
    with_plan = costs_of(entry).under(entry_for(64)[0], scheduled(chain, least.schedule))
    assert best_of(chain, [(64, with_plan)], 64, Budget(most), 0.0, slots=500).schedule == keep_all  # type: ignore[union-attr]
    tight = Budget(least.peak_bytes)
    assert best_of(chain, [(64, with_plan)], 64, tight, 0.0, slots=500).schedule == least.schedule  # type: ignore[union-attr]
    assert best_of(chain, [(64, with_plan)], 64, Budget(1), 0.0, slots=500) is None
    assert lost_by(least, 0.0) > lost_by(least, least.overhead) == 0.0
    assert least_overhead_of([(64, with_plan)], 128, chain, tight) == with_plan.plan.overhead
    assert least_overhead_of([(64, with_plan)], 32, entry_for(32)[1].profile.chain, tight) == 0.0


def three_layers() -> Checkpointable:
    return Checkpointable(nn.Sequential(*(nn.Linear(8, 8), nn.Tanh()) * 3), torch.randn(4, 8), show_progress=False)


NET = three_layers()


def entries_by_rows(*overheads: tuple[int, bool], net: Checkpointable = NET) -> list[tuple[Signature, Prepared]]:
    """Calls of one module with so many rows; those with True recompute all they can."""
    plans = net._planned.plans
    entries = []
    for rows, is_lean in overheads:
        signature, value = plans.signature_and_input((torch.randn(rows, 8),), {})
        costs = plans.measure(signature, value)
        chain = costs.profile.chain
        schedule = minimum_budget(chain).schedule if is_lean else Schedule.keep_all(len(chain))
        budget_bytes = simulate(chain, schedule).peak_bytes
        entries.append((signature, costs.under(signature, scheduled(chain, schedule, budget_bytes))))
    return entries


def test_a_larger_size_covers_a_smaller_one_and_tells_what_that_may_lose() -> None:
    small, between, large = entries_by_rows((8, False), (16, True), (32, True))
    wanted = between[0]
    assert covering(wanted, [small]) is None
    assert covering(wanted, [large]) == (large[1], lost_by(large[1].plan, 0.0))
    assert covering(wanted, [small, large]) == (large[1], lost_by(large[1].plan, 0.0))
    assert covering(large[0], [between]) is None
    # A smaller size that needs as much recomputation says that nothing is lost.
    smaller_lean, other_large = entries_by_rows((8, True), (32, True))
    found = covering(wanted, [smaller_lean, other_large])
    assert found is not None
    assert found[1] <= lost_by(other_large[1].plan, 0.0)
    # The plan of a size that keeps all is covered for nothing.
    plain_large = entries_by_rows((32, False))[0]
    assert covering(wanted, [large, plain_large]) == (plain_large[1], 0.0)


def test_sizes_are_told_apart_by_all_dimensions_and_those_of_another_recording_are_passed_over() -> None:
    small, wanted, large = entries_by_rows((8, False), (16, False), (32, False))
    foreign = entries_by_rows((8, True), (32, True), net=three_layers())
    wider, _ = NET._planned.plans.signature_and_input((torch.randn(1, 32, 8),), {})  # another number of dimensions
    around = sizes_around(wanted[0], [large, *foreign, (wider, large[1]), small])
    assert around.larger == [large[1]]
    assert around.smaller == [small[1]]
    assert sizes_around(large[0], [large]).larger == [large[1]]  # no smaller than itself
    assert covering(wanted[0], foreign) is None


def test_a_plan_beyond_its_budget_covers_nothing() -> None:
    (signature, entry), wanted = entries_by_rows((32, False))[0], entries_by_rows((16, False))[0][0]
    beyond = entry.costs.under(signature, scheduled(entry.profile.chain, entry.schedule, 1))
    assert covering(wanted, [(signature, beyond)]) is None
