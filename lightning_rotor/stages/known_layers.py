"""Layers of torch whose behaviour is known, and whether calling a module runs any other code."""

from __future__ import annotations

from torch import nn

from lightning_rotor.private import torch_names as private

DRAWING = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    *(nn.MultiheadAttention, nn.RNNBase, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d),
)
"""Torch's layers that may draw random numbers in training."""
NORMALIZATIONS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""Torch's layers with running statistics."""


def is_plain_stock(module: nn.Module) -> bool:
    """True if a module is one of torch's own layers, unhooked and not parametrized, so that its behaviour is known."""
    # A parametrized layer has a class of its own, which is made in another module of torch's.
    return (
        type(module).__module__.startswith("torch.nn.modules.")
        and not private.has_forward_hooks(module)
        and "forward" not in module.__dict__
    )


def has_own_code(module: nn.Module) -> bool:
    """True if calling a module runs code that is neither torch's nor ours, not counting hooks."""
    if not type(module).__module__.startswith(("torch.nn.modules.", "lightning_rotor.")):
        return True
    # A planned module has a forward of ours in its attributes, and says so.
    return "forward" in module.__dict__ and "_lightning_rotor" not in module.__dict__


def does_more_than_forward(module: nn.Module) -> bool:
    """True if calling a module does more than its class's forward: hooks, also for all modules, or compiled code."""
    return (
        # In the module's own dict, which a __getattr__ of the user's cannot answer for.
        any(module.__dict__[name] for name in private.HOOKS)
        or private.any_hooks_of_all()
        or "forward" in module.__dict__
        or private.is_compiled_in_place(module)
    )


def runs_members_in_a_row(module: nn.Sequential) -> bool:
    """True if an ``nn.Sequential`` has no forward of its own."""
    # Nor a call of its own, which would run around the forward.
    is_plain_call = type(module).__call__ is nn.Module.__call__
    return type(module).forward is nn.Sequential.forward and is_plain_call
