"""Planning: which stages to keep and which to recompute, so that a step fits a memory budget and takes the least time.

Chain, budget ──► thresholds ──► dynamic program ──► proposals ──► simulator ──► Plan
(slots)        (one table for      (schedule     (bytes; the
every budget)       trees)        judge)
"""

from lightning_rotor.planning.baselines import baselines
from lightning_rotor.planning.plan import Plan, Proposal, Solver, fine_slots, minimum_budget, plan

__all__ = ["Plan", "Proposal", "Solver", "baselines", "fine_slots", "minimum_budget", "plan"]
