"""Hooks of MkDocs, named in mkdocs.yml."""

from __future__ import annotations

import re
from typing import Any

_OUT_OF_DOCS = re.compile(r"\]\(\.\./(?=\w)")


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Lead links out of docs/ to the repository, whose other files are not part of the site."""
    return _OUT_OF_DOCS.sub(f"]({config.repo_url}/blob/HEAD/", markdown)
