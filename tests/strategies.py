"""Random chains and schedules for hypothesis; those of benchmarks/random_chains.py, for tests that draw them by themselves."""

from __future__ import annotations

from hypothesis import strategies as st

from benchmarks.random_chains import (
    KINDS,
    Kind,
    random_chain,
    random_link,
    random_moves,
    random_schedule,
    with_inversion,
    with_skips,
)
from lightning_rotor.chain import Chain
from lightning_rotor.schedule import Schedule

__all__ = [
    "KINDS",
    "Kind",
    "chains",
    "random_chain",
    "random_link",
    "random_moves",
    "random_schedule",
    "schedules",
    "with_inversion",
    "with_skips",
]


@st.composite
def chains(draw: st.DrawFn, *, max_stages: int = 8, kinds: tuple[Kind, ...] = KINDS) -> Chain:
    """Chains for hypothesis."""
    rng = draw(st.randoms(use_true_random=False))
    return random_chain(
        rng, draw(st.integers(1, max_stages)), draw(st.sampled_from(kinds)), grain=draw(st.sampled_from((1, 512)))
    )


@st.composite
def schedules(draw: st.DrawFn, chain: Chain) -> Schedule:
    """Schedules of one chain."""
    return random_schedule(draw(st.randoms(use_true_random=False)), chain)
