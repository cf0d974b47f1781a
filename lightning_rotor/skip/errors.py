"""What can be wrong with skip connections."""

from __future__ import annotations

from lightning_rotor.errors import RotorError


class SkipDeclarationError(RotorError, TypeError):
    """Declarations of skip connections do not match: something is stashed and never popped, or the other way round."""


class SkipError(RotorError, RuntimeError):
    """A layer did not do what it declared: it stashed or popped something else, or too little."""
