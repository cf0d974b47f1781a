"""An extension of Griffe, named in mkdocs.yml: functions that a module of their own name hides from it.

``lightning_rotor.planning.plan`` is a function and a module. Python gives the function, Griffe the module; so the
reference asks for ``lightning_rotor.planning.plan_function``.
"""

from __future__ import annotations

from typing import Any

from griffe import Extension, Function


class ShadowedFunctions(Extension):
    """Keeps functions of packages under a second name that ends in ``_function``."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[Function] = []

    def on_function_instance(self, *, func: Function, **_: Any) -> None:
        """Remember a function of a package's ``__init__``."""
        if func.parent is not None and func.parent.is_init_module:
            self._found.append(func)

    def on_package(self, **_: Any) -> None:
        """Give those that a module has replaced another name."""
        for func in self._found:
            if func.parent is not None and func.parent.members.get(func.name) is not func:
                func.parent.members[f"{func.name}_function"] = func
