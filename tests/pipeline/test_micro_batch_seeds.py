"""Random numbers of micro-batches: they follow from step, micro-batch and stage, and from nothing else."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from lightning_rotor.capture.sequentialize import sequentialize
from lightning_rotor.execution.passes import run_stage
from lightning_rotor.pipeline.micro_batch_seeds import OUTSIDE, mixed, with_seeds
from lightning_rotor.profiling import profile_chain


def test_seeds_differ_for_all_neighbours_and_fit_into_torch() -> None:
    seeds = {
        mixed(mixed(mixed(seed, step), micro_batch), stage)
        for seed, step, micro_batch, stage in itertools.product((0, 1, 2**63), range(3), range(4), range(OUTSIDE, 5))
    }
    assert len(seeds) == 3 * 3 * 4 * 6
    assert all(0 <= seed < 2**63 for seed in seeds)
    torch.Generator().manual_seed(max(seeds))


def test_a_seed_is_the_finalizer_of_splitmix64() -> None:
    # The first number of SplitMix64 for the seed 0, without its sign.
    assert mixed(0, -1) == 0xE220A8397B1DCDAF & (2**63 - 1)


def test_a_stage_draws_the_same_whatever_ran_before_it_and_leaves_the_generator_alone() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5))
    x = torch.ones(8, 4)
    cut = sequentialize(net, (x,))
    chain = profile_chain(cut.stages, cut.bind((x,), {})).chain
    seeded = with_seeds(cut.stages, chain)
    drawing = [place for place, cost in enumerate(chain) if cost.draws_random]
    assert len(drawing) == 2
    assert all(seeded[place] is cut.stages[place] for place in range(len(chain)) if place not in drawing)

    one, other = (seeded[place] for place in drawing)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = run_stage(one, x)
    assert torch.equal(torch.get_rng_state(), state)
    run_stage(other, x)
    assert torch.equal(run_stage(one, x), first)
    assert not torch.equal(run_stage(other, x), first)
