"""Runs Python code in a forked process, as ``python -c`` would in a new one, but with torch and torchmetrics imported already.

These take most of the six seconds in which Lightning is imported. Neither Lightning nor this package has been imported:
code that shows how they are can hide what it likes before.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import types
from importlib import import_module
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]


class ImportedPython:
    """A process that has imported them, and is forked for each call."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.imported_python"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def run(self, code: str, cwd: Path = ROOT, seconds: int = 250) -> str:
        """What the code prints; it must succeed."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            streams = {name: str(Path(folder) / name) for name in ("stdout", "stderr")}
            request = {"code": code, "cwd": str(cwd), "seconds": seconds, **streams}
            self._server.stdin.write(json.dumps(request) + "\n")
            self._server.stdin.flush()
            status = self._server.stdout.readline().strip()
            printed, reported = (Path(path).read_text(encoding="utf-8") for path in streams.values())
        assert status == "0", f"exit status {status}: {reported}"
        return printed

    def close(self) -> None:
        """End it."""
        self._server.communicate()


def _serve(requests: IO[str], answers: IO[str]) -> None:
    for name in ("torch", "torchmetrics"):
        import_module(name)
    early = [
        name for name in sys.modules if name.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_rotor")
    ]
    assert not early, f"these would be there already: {early}"
    # So that no process looks through what is imported, or copies it to count who refers to it.
    gc.collect()
    gc.freeze()
    for line in requests:
        process = os.fork()
        if not process:
            _run(**json.loads(line))
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _run(code: str, cwd: str, seconds: int, stdout: str, stderr: str) -> None:
    """Never returns: the code, its streams in files, and the end of this process."""
    for descriptor, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    signal.alarm(seconds)
    os.chdir(cwd)
    sys.argv, sys.path[0] = ["-c"], ""
    main: Any = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    status = 0
    try:
        exec(compile(code, "<string>", "exec"), vars(main))
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _serve(sys.stdin, sys.stdout)
