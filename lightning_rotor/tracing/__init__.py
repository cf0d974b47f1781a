"""Modules that are no ``nn.Sequential`` as chains: trace the forward with ``torch.fx``, cut it where one value is alive.

module, call ──► tracer ──► graph ──► slices ──► GraphCut
(arguments)    (watches what the  (a stage runs   (holds for a call until
trace takes for granted)   one of them)   the module changes)
"""

from lightning_rotor.tracing.cuts import GraphCut, cut_graph, cut_recording
from lightning_rotor.tracing.slices import GraphSlice

__all__ = ["GraphCut", "GraphSlice", "cut_graph", "cut_recording"]
