"""Devices and links: seconds of collectives that were computed by hand, figures of data sheets, and bad input."""

from __future__ import annotations

import pytest

from lightning_rotor.advising.cluster import Cluster
from lightning_rotor.errors import AdviceError
from lightning_rotor.pipeline.partition import Link
from lightning_rotor.profiling.accelerators import GPUS


def test_collectives_go_around_a_ring() -> None:
    cluster = Cluster(GPUS["H100"], 8, 4, Link(100.0, 0.5), Link(10.0, 1.0))
    assert cluster.gather_seconds(800.0, 8) == pytest.approx(7 * (0.5 + 1.0))
    assert cluster.sum_seconds(800.0, 8) == pytest.approx(2 * 7 * 1.5)
    # Over nodes, eight cards of a node send at once; every eighth device has one.
    assert cluster.gather_seconds(3200.0, 32) == pytest.approx(31 * (1.0 + 100 / 80))
    assert cluster.gather_seconds(400.0, 4, apart=8) == pytest.approx(3 * (1.0 + 100 / 10))
    assert cluster.gather_seconds(400.0, 1) == 0.0


def test_between_nodes_there_is_the_network() -> None:
    cluster = Cluster(GPUS["H100"], 4, 2, Link(100.0, 0.5), Link(10.0, 1.0))
    assert cluster.size == 8
    assert cluster.between_neighbours(2) == cluster.link
    assert cluster.between_neighbours(4) == cluster.link
    # Of groups of three, some lie on two nodes.
    assert cluster.between_neighbours(3) == cluster.network
    assert cluster.between_neighbours(8) == cluster.network


def test_figures_are_those_of_data_sheets_unless_some_were_measured() -> None:
    assert set(GPUS) == {name for name in GPUS if Cluster.of(name.upper(), 1).gpu is GPUS[name]}
    sheet = Cluster.of("h100", 8)
    assert sheet.link.bytes_per_second == pytest.approx(0.8 * 450e9)
    assert sheet.network.bytes_per_second == pytest.approx(0.8 * 50e9)
    measured = Cluster.of("h100", 8, 2, link=123.0, network=45.0)
    assert (measured.link.bytes_per_second, measured.network.bytes_per_second) == (123.0, 45.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpu": "H900"}, r"gpu 'H900' is unknown: expected one of B200, H200, GH200, H100, "),
        ({"devices": 0}, "devices is 0: expected a positive integer"),
        ({"nodes": True}, "nodes is True: expected a positive integer"),
        ({"link": -1.0}, "link is -1.0: expected measured bytes per second"),
    ],
)
def test_a_wrong_cluster_is_refused_by_name(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(AdviceError, match=message):
        Cluster.of(**({"gpu": "h100", "devices": 8} | arguments))  # type: ignore[arg-type]
