"""The documentation: the site builds without a warning, and what README, pages and notebook show runs."""

from __future__ import annotations

import contextlib
import logging
import re
from pathlib import Path
from unittest import SkipTest

import lightning as L
import pytest
import torch
from torch import nn

import lightning_rotor
from tests.processes import ROOT

pytest.importorskip("mkdocs")
pytest.importorskip("sybil")

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(path for path in DOCS.glob("*.md") if "```python" in path.read_text())]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole site, built as `make docs` does; a broken link or an unknown name is an error."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder)))
    return folder


# What libraries of the site announce to drop is theirs to mend.
@pytest.mark.filterwarnings("ignore")
def test_the_site_builds_without_a_warning(site: Path) -> None:
    assert {path.stem for path in DOCS.glob("*.md")} - {"index"} <= {path.name for path in site.iterdir()}
    assert "image/png" in (site / "tutorial" / "index.html").read_text()


@pytest.mark.filterwarnings("ignore")
def test_the_reference_has_every_public_name(site: Path) -> None:
    page = (site / "api" / "index.html").read_text()
    named = set(re.findall(r'id="lightning_rotor\.(?:\w+\.)*(\w+)"', page))
    assert set(lightning_rotor.__all__) - {"__version__"} <= named
    assert page.count("doc-object doc-module") == 1  # the errors; plan and frontier are functions and modules
    assert ":class:" not in page
    assert ":func:" not in page


def names_of_a_reader() -> dict[str, object]:
    """What blocks may use without making it: a LightningModule, its data, a network, its input, branches of couplings."""

    class Classifier(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            images, classes = batch
            return nn.functional.cross_entropy(self.net(images), classes)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    images = torch.randn(8, 3, 8, 8)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, torch.arange(8) % 4), batch_size=4)
    names = {"model": Classifier(), "data": data, "net": network(), "images": images}
    more = {"x": torch.randn(4, 16), "branch": lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh())}
    return {**names, **more, "L": L, "torch": torch, "nn": nn}


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_of_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sybil import Sybil
    from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

    monkeypatch.chdir(tmp_path)  # where blocks leave plans, pictures and logs
    monkeypatch.setattr(logging.root, "handlers", [])
    document = Sybil(parsers=[PythonCodeBlockParser(), SkipParser()]).parse(page)
    document.namespace.update(names_of_a_reader())
    blocks = list(document.examples())
    assert blocks
    for block in blocks:
        with contextlib.suppress(SkipTest):  # `<!-- skip: next "the reason" -->` stands above it
            block.evaluate()


@pytest.mark.wide
def test_the_notebook_runs(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    from nbclient import NotebookClient

    notebook = nbformat.read(DOCS / "tutorial.ipynb", as_version=4)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in data for data in shown)
    tables = [data["text/html"] for data in shown if "<svg" in data.get("text/html", "")]
    assert len(tables) == 2  # a curve and a plan, each a picture and a table
    # A curve says "overhead" in a column, and the table of a plan has a row for the time that it adds.
    texts = [re.sub(r".*</svg>", "", table.lower(), flags=re.DOTALL) for table in tables]
    assert sum("overhead" in text for text in texts) >= 1
    assert all("overhead" in text or "time added to" in text for text in texts)


def test_lines_of_the_readme_fit_a_screen() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 130
    assert max(map(len, lines)) <= 120
