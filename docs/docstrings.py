"""Docstrings as the site needs them; an extension of Griffe, named in mkdocs.yml.

In the source, sections stand without blank lines between them, Sphinx's roles lead to names, and nobody needs a link to
the line that is being read.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_REPOSITORY = "https://github.com/lightning-rotor/lightning-rotor/blob/HEAD"
_SECTION = re.compile(r"\n+(Args|Attributes|Example|Raises|Returns|Source|Warns|Yields):\n(?= )")
_ROLE = re.compile(r":(?:attr|class|exc|func|meth|mod):`~?([\w.]+)`")


class Docstrings(griffe.Extension):
    """Sections with blank lines before them, names in the place of roles, and a link to the source."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a class, function or attribute."""
        if obj.docstring is None:
            return
        text = _SECTION.sub(lambda found: f"\n\n{_plural(found[1])}:\n", obj.docstring.value)
        text = _ROLE.sub(lambda found: f"`{_last(found[1])}`", text)
        if (obj.is_class or obj.is_function) and "property" not in obj.labels:
            text += f"\n\n[Source]({_REPOSITORY}/{obj.relative_package_filepath.as_posix()}#L{obj.lineno})"
        obj.docstring.value = text


def _plural(section: str) -> str:
    """A section as Griffe calls it: under this name it shows code."""
    return "Examples" if section == "Example" else section


def _last(path: str) -> str:
    """What a dotted name ends in; ``.kernels`` names a module beside the one that is read."""
    return path.rpartition(".")[2]
