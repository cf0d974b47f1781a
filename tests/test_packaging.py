"""What a registry gets: a source distribution that is whole, and a wheel with links that lead somewhere, both built offline."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest
import yaml

import lightning_rotor
from tests import release
from tests.compatibility import TORCHS
from tests.processes import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAME = f"lightning_rotor-{lightning_rotor.__version__}"
LINK = re.compile(r"\]\(([^)]+)\)")


def built(folder: Path, source: Path, kind: str) -> Path:
    """An archive as a build frontend makes it."""
    pytest.importorskip("hatch_fancy_pypi_readme")
    code = f"from hatchling.build import build_{kind}; print(build_{kind}({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=True)
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, on disk."""
    folder = tmp_path_factory.mktemp("sdist")
    filtered = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # since Python 3.11.4
    shutil.unpack_archive(built(folder, ROOT, "sdist"), folder, **filtered)
    return folder / NAME


@pytest.fixture(scope="module")
def installed(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Distribution:
    """The wheel that is built from it, installed into a folder of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = built(folder, unpacked, "wheel")
    command = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-compile",
        "--target",
        str(folder / "site"),
    ]
    subprocess.run([sys.executable, *command, str(wheel)], check=True)
    (found,) = distributions(name="lightning-rotor", path=[str(folder / "site")])
    return found


def names(folder: Path) -> set[str]:
    """Files that are not there by chance."""
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.suffix in {".py", ".typed", ".c", ".ipynb", ".md", ".png", ".json", ".yaml"}
        and "output" not in path.parts
    }


def test_the_source_distribution_has_all_that_tests_and_documents_need(unpacked: Path) -> None:
    for folder in ("lightning_rotor", "tests", "docs", "examples", "benchmarks"):
        assert names(ROOT / folder) == names(unpacked / folder)
    for link in LINK.findall((ROOT / "README.md").read_text()):
        assert link.startswith("https://") or (unpacked / link).exists(), f"README.md links {link}"
    assert {"mkdocs.yml", "CITATION.cff", "CODE_OF_CONDUCT.md", "Makefile", "SECURITY.md"} <= {
        path.name for path in unpacked.iterdir()
    }


def test_the_wheel_has_the_package_alone(installed: Distribution) -> None:
    files = {str(path) for path in installed.files or () if path.suffix != ".pyc"}
    package = {name for name in files if ".dist-info" not in name and not name.startswith("../")}
    assert package == {f"lightning_rotor/{name}" for name in names(ROOT / "lightning_rotor")}


def test_a_registry_shows_who_made_it_and_links_that_lead_somewhere(installed: Distribution) -> None:
    about = installed.metadata
    assert about["Summary"]
    assert about["License-Expression"] == "Apache-2.0"
    assert {"Requires-Python", "Keywords", "Classifier", "License-File"} <= set(about)
    assert about["Author"] == "lightning-rotor developers"
    urls = dict(url.split(", ") for url in about.get_all("Project-URL"))
    assert urls.keys() == {"Homepage", "Documentation", "Changelog", "Issues"}
    assert about["Description-Content-Type"] == "text/markdown"
    text = about["Description"] or about.get_payload()  # the first where a package has brought importlib_metadata along
    assert text.startswith("# lightning-rotor")
    own = [link for link in LINK.findall(text) if link.startswith(urls["Homepage"])]
    relative = [link for link in LINK.findall((ROOT / "README.md").read_text()) if not link.startswith("https://")]
    assert [link.partition("/HEAD/")[2] for link in own] == relative
    assert all(("/raw/" in link) == link.endswith(".png") for link in own)
    assert all(link.startswith("https://") for link in LINK.findall(text))
    assert all(url.startswith(urls["Homepage"]) for url in urls.values())


def test_no_tracked_file_is_above_one_mebibyte() -> None:
    """Three wheels of 52 MB were committed once, by `git add .` after an installation by hand."""
    if not (ROOT / ".git").exists():
        pytest.skip("a source distribution has no index of tracked files")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    heavy = {path.name: path.stat().st_size for path in paths if path.exists() and path.stat().st_size > 2**20}
    assert len(paths) > 100
    assert not heavy


def test_all_files_name_one_version() -> None:
    assert release.disagreements() == []
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"message", "title", "authors", "license"} <= cited.keys()
    assert lightning_rotor.__version__ == "1.0.0"


def test_the_workflow_and_the_local_entry_run_the_commands_of_the_makefile() -> None:
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == [".ci/run ${{ matrix.arguments }}"]
    matrix = job["strategy"]["matrix"]
    arguments = [*matrix["arguments"], *(more["arguments"] for more in matrix["include"])]
    run = {text.split()[0] for text in arguments}
    assert {"test", "demo", "docs", "release-check"} == run <= targets
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = re.findall(r"Python :: (3\.\d+)", " ".join(about["classifiers"]))
    assert matrix["python"] == declared
    torchs = [text.partition("TORCH=")[2] for text in arguments if "TORCH=" in text]
    assert torchs == [TORCHS[0], TORCHS[-1]]
    assert f"torch>={TORCHS[0].rpartition('.')[0]}" in about["dependencies"]
    entry = (ROOT / ".ci" / "run").read_text()
    assert entry.endswith('exec make "$@"\n')
    assert ".DEFAULT_GOAL := test\n" in (ROOT / "Makefile").read_text()


# Half a minute, for what `make release-check` does before a release.
@pytest.mark.wide
def test_a_release_passes_its_check_with_borrowed_dependencies(capsys: pytest.CaptureFixture[str]) -> None:
    """Its wheel, in an environment of its own, says its version and runs the first example of the README."""
    pytest.importorskip("hatch_fancy_pypi_readme")
    assert release.main(["--borrow"]) == 0
    said, numbers, *_ = capsys.readouterr().out.splitlines()
    assert said.startswith(
        f"lightning-rotor {lightning_rotor.__version__}: lightning_rotor-1.0.0-py3-none-any.whl installs"
    )
    schedule, overhead, _ = numbers.split()
    assert schedule
    assert float(overhead) == 0.0


def test_a_version_that_another_file_names_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "VERSION", "9.9")
    assert release.disagreements() == [
        "CITATION.cff names 1.0.0, and the package 9.9",
        "CHANGELOG.md names 1.0.0, and the package 9.9",
    ]
    assert not release.is_dated()
