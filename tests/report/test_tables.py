"""Tables of plans, of their stages and of curves: what they say, and for whom they fit."""

from __future__ import annotations

import random
import re

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.reference import baselines
from lightning_rotor.chain import Chain
from lightning_rotor.link import Link, Transfer
from lightning_rotor.planning import Plan, frontier
from lightning_rotor.report.tables import frontier_table, plan_table, stage_table
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import Traffic, held_by_stage, simulate
from lightning_rotor.units import format_bytes
from tests.report.small_plans import CHAIN, FEW, MIB, cells, plan_for, printed, rows
from tests.strategies import chains, random_chain, with_skips


def test_the_table_says_what_a_plan_costs():
    plan = plan_for("(0-2) (3-5) 6-7")
    assert rows(plan_table(plan)) == {
        "Limit": "60.0 MiB",
        "Peak without recomputation": "72.0 MiB",
        "Peak with this plan": format_bytes(plan.peak_bytes),
        "Time added to these modules": "25.0 %, predicted",
        "Planning took": "12.3 ms",
        "Recomputed": "6 of 8 stages",
        "Schedule, recomputed in ()": "(0-2) (3-5) 6-7",
        "A better plan could save": "at most 13.3 % of that time",
    }


def test_the_rows_answer_questions_in_their_order():
    names = list(
        rows(
            plan_table(
                plan_for("(0-2) (3-5) 6-7"), memory_rows=[("Reserved", "2 GiB")], extra_rows=[("Planned", "net")]
            )
        )
    )
    fits, costs, what, better = names[:4], names[4:6], names[6:9], names[9:]
    assert fits == ["Limit", "Peak without recomputation", "Peak with this plan", "Reserved"]
    assert costs == ["Time added to these modules", "Planning took"]
    assert what == ["Recomputed", "Schedule, recomputed in ()", "Planned"]
    assert better == ["A better plan could save"]


def test_one_number_stands_for_one_thing_the_measured_one_if_there_is_one():
    plan = plan_for("(0-2) (3-5) 6-7")
    planned = rows(plan_table(plan, final_peak_bytes=90 * MIB))
    until = format_bytes(plan.peak_bytes)
    assert planned["Peak with this plan"] == f"90.0 MiB, when the optimizer steps; {until} until then"
    table = plan_table(
        plan, final_peak_bytes=90 * MIB, measured_peak_bytes=91 * MIB, measured_overhead=0.3, measuring_seconds=2
    )
    shown = rows(table)
    assert shown["Peak with this plan"] == "91.0 MiB, measured"
    assert shown["Time added to these modules"] == "30.0 %, measured"
    assert shown["Measuring, planning took"] == "2 s, 12.3 ms"


def test_an_optimal_plan_says_that_none_is_faster():
    assert rows(plan_table(plan_for("0-7")))["A better plan could save"].startswith("nothing: no schedule within")


def test_a_table_that_is_printed_again_says_why():
    text = printed(plan_table(plan_for("0-7"), reason="a larger input came"), 100)
    assert text.startswith("Recomputation plan, printed again: a larger input came")


def test_the_table_shows_the_whole_process_if_it_knows_it():
    table = plan_table(
        plan_for("0-7", budget_bytes=80 * MIB),
        reserved_bytes=100 * MIB,
        measured_peak_bytes=170 * MIB,
        plain_peak_bytes=200 * MIB,
        extra_rows=[("Accuracy", "97 %")],
    )
    shown = rows(table)
    assert shown["Limit"] == "180 MiB, 80.0 MiB of it for activations and new gradients"
    assert shown["Peak without recomputation"] == "200 MiB"
    assert shown["Peak with this plan"] == "170 MiB, measured"
    assert list(shown)[-2:] == ["Accuracy", "A better plan could save"]
    assert rows(plan_table(plan_for("0-7"), reserved_bytes=100 * MIB))["Peak without recomputation"] == "172 MiB"


def test_the_table_of_a_plan_beyond_the_limit_says_so():
    shown = rows(plan_table(plan_for("0-7"), limit_bytes=110 * MIB, reserved_bytes=100 * MIB))
    assert shown["Limit"] == "110 MiB, which no plan keeps: this one takes least"
    assert shown["Peak with this plan"] == "172 MiB"


def test_the_table_fits_a_terminal():
    text = printed(plan_table(plan_for("((0 1-2) 3-5) 6-7"), reserved_bytes=MIB))
    assert max(map(len, text.splitlines())) <= 80
    assert "((0-2) 3-5) 6-7" in text or "((0 1-2) 3-5) 6-7" in text


def test_the_stages_are_told_in_runs_of_equal_treatment():
    assert cells(stage_table(plan_for("((0-1) 2) 3-5 (6) 7"))) == [
        ["0-2", "layer0 … layer2", "recompute, up to twice", "0 B", "5 ms"],
        ["3-5", "layer3 … layer5", "keep", "24.0 MiB", ""],
        ["6", "layer6", "recompute", "4.00 MiB", "1 ms"],
        ["7", "layer7", "keep", "12.0 MiB", ""],
        ["", "peak 48.0 MiB at layer7", "", "40.0 MiB", "6 ms"],
    ]


@given(chains(max_stages=12), st.randoms(use_true_random=False))
def test_what_stages_hold_is_what_the_forward_leaves_behind(chain: Chain, rng: random.Random):
    chain = with_skips(rng, chain) if len(chain) > 3 else chain
    for each in baselines(chain).values():
        found = Plan(chain, each, 10**9, simulate(chain, each), 0.0)
        after_forward = next(
            after.after_bytes
            for event, after in zip(found.simulation.events[1:], found.simulation.events, strict=False)
            if event.phase != "forward"
        )
        states = sum(stage.state_bytes for stage in chain) + chain.rng_state_bytes * len(chain)
        # The input of the last stage may still be around, and segments remember states.
        last_input = chain.stages[-2].output_bytes if len(chain) > 1 else 0
        held = sum(held_by_stage(chain, each))
        skips = sum(skip.size_bytes for skip in chain.skips)
        assert held <= after_forward + skips
        assert after_forward <= held + last_input + states + skips


def test_a_long_table_loses_its_middle():
    chain = random_chain(random.Random(0), 200, "heterogeneous")
    schedule = Schedule.parse(" ".join(f"({number}) {number + 1}" for number in range(0, 200, 2)))
    found = Plan(chain, schedule, 10**6, simulate(chain, schedule), 0.0)
    rows_shown = cells(stage_table(found, most_rows=11))
    assert len(rows_shown) == 11 + 1
    assert set(rows_shown[5]) == {"⋮"}
    assert rows_shown[0][0] == "0"
    assert rows_shown[-2][0] == "199"
    assert max(map(len, str(found).splitlines())) <= 100


def test_a_plan_prints_as_its_tables():
    text = str(plan_for("(0-2) 3-7"))
    assert text.startswith("Recomputation plan\n╭")
    assert "layer3 … layer7" in text
    assert printed(plan_for("(0-2) 3-7"), 100).split() == text.split()


def test_the_frontier_is_told_with_what_the_process_holds_besides():
    found = frontier(CHAIN)
    shown = cells(frontier_table(found, reserved_bytes=1024 * MIB, most_rows=5))
    assert len(shown) <= 5
    assert shown[0][0] == format_bytes(1024 * MIB + found[0].peak_bytes)
    assert shown[-1][1:3] == ["0.00%", "24 ms"]
    assert {"least", "keep all"} <= {row[4] for row in shown}


def test_a_plan_with_a_link_says_what_moves_and_what_the_link_carries() -> None:
    found = plan_for("0>2 1> 2-7", link=Link(4e9, 1e9, latency=0.0))
    said = rows(plan_table(found))
    assert said["Moved"] == f"2 of 8 stages, {format_bytes(found.host_bytes)} elsewhere, 14.7 ms of waits"
    share = f"{4e9 * 0.008 / simulate(CHAIN, Schedule.keep_all(8)).peak_bytes:.0%}"
    assert said["Link"].startswith(f"4 GB/s out and 1 GB/s back: in a forward {share} of the peak")
    assert re.search(r"; busy \d+% of the forward, \d+% of the backward$", said["Link"])
    stays = rows(plan_table(plan_for("0-7", link=Link(1e9, 1e9))))
    assert stays["Moved"] == "none of 8 stages"
    assert "busy" not in stays["Link"]
    assert "Link" not in rows(plan_table(plan_for("0-7")))


def test_the_curve_says_what_plans_without_moves_cost() -> None:
    found, staying = frontier(FEW, link=Link(2e9, 2e9)), frontier(FEW)
    shown = cells(frontier_table(found, staying=staying))
    for row in shown:
        assert row[3] == "no plan" or float(row[1][:-1]) <= float(row[3][:-1])
    assert shown[-1][3] == "0.00%"


def test_busy_is_the_share_of_a_direction_in_its_half_of_the_step() -> None:
    copies = (Transfer("out", 0, 1.0, 5.0), Transfer("back", 0, 4.0, 7.0))
    shares = Traffic(copies, forward_seconds=4.0, seconds=10.0)
    assert shares.busy("out") == 3 / 4
    assert shares.busy("back") == 3 / 6
