"""Tables of advice, and the same for scripts."""

from __future__ import annotations

import json

from lightning_rotor.advising.advice import Advice
from lightning_rotor.advising.choice import Choice, StepSeconds
from lightning_rotor.advising.cluster import Cluster
from lightning_rotor.report.advice_table import advice_as_json, advice_parts, advice_table
from tests.report.small_plans import printed

DDP = Choice("DDP", 8, 4, 2**30, StepSeconds(0.5, recomputation=0.5), "ddp()", 8, recomputed=3, chain_length=9)
PIPELINE = Choice(
    "pipeline", 8, 32, 2**29, StepSeconds(1.0, bubble=1.0), "pipe()", stages=8, schedule="1f1b", micro_batches=16
)
PARTS = Choice("one device", 1, 32, 2**28, StepSeconds(4.0), "one()", accumulated=4)


def advice(nodes: int = 1) -> Advice:
    cluster = Cluster.of("H100", 8 // nodes, nodes)
    return Advice((DDP, PIPELINE, PARTS), (("FSDP2", "no blocks"),), cluster, 32, 2**31)


def rows(table: object) -> list[list[str]]:
    lines = [line for line in printed(table, 160).splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_each_way_has_a_row_with_what_limits_it() -> None:
    header, *ways = rows(advice_table(advice()))
    assert header[1:] == ["way", "batch a copy", "bytes a device", "step", "samples/s", "recomputed", "limited by"]
    assert ways == [
        ["1", "DDP", "4", "1.00 GiB", "1 s", "32", "3 of 9", "recomputation, 50%"],
        ["2", "pipeline of 8, 1f1b", "32 in 16", "512 MiB", "2 s", "16", "", "bubble, 50%"],
        ["3", "one device", "32 in 4 steps", "256 MiB", "4 s", "8", "", "compute, 100%"],
    ]


def test_the_title_says_for_which_devices_and_how_many_samples() -> None:
    assert printed(advice_table(advice()), 160).startswith("32 samples a step on 8 x H100, 2.00 GiB each")
    assert "on 2 x 4 x H100" in printed(advice_table(advice(nodes=2)), 160)


def test_below_the_table_stand_reasons_and_the_lines_of_the_first_ways() -> None:
    _, *below = advice_parts(advice(), most_lines=2)
    assert below[0] == "Not listed: FSDP2: no blocks."
    assert below[-2:] == ["\n# 1: DDP\nddp()", "\n# 2: pipeline of 8, 1f1b\npipe()"]


def test_scripts_get_numbers() -> None:
    answer = json.loads(json.dumps(advice_as_json(advice(), "net")))
    assert (answer["model"], answer["gpu"], answer["batch"], answer["limit_bytes"]) == ("net", "H100", 32, 2**31)
    assert answer["left_out"] == {"FSDP2": "no blocks"}
    first = answer["choices"][0]
    assert first["seconds"] == {"total": 1.0, "compute": 0.5, "recomputation": 0.5, "link": 0.0, "bubble": 0.0}
    assert (first["kind"], first["copies"], first["limited_by"], first["lines"]) == ("DDP", 8, "recomputation", "ddp()")
