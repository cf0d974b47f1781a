"""Runs tests marked ``gpu`` on the simulated device, and reports them as if they had run here."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress

import pytest

from tests.cuda_device import environment


class _Server:
    """A process that sees two devices and has collected all tests that are marked ``gpu``."""

    def __init__(self, session: pytest.Session) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        here, there = socket.socketpair()
        wide = ["--all"] * session.config.getoption("--all")  # the same tests as here
        files = dict.fromkeys(str(item.path) for item in session.items if item.get_closest_marker("gpu"))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-n0", "-p", "tests.cuda_device.server", "-p", "no:cacheprovider", "-m", "gpu", *wide, *files],
            cwd=session.config.rootpath, env=environment(devices=2) | {"SIMULATED_CHANNEL": str(there.fileno())},
            stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT, pass_fds=[there.fileno()],
        )  # fmt: skip
        there.close()
        self._channel = here.makefile("rwb")
        here.close()

    def reports(self, name: str, following: str) -> list[pytest.TestReport]:
        """What came of a test; fixtures stay for the one that follows."""
        try:
            self._channel.write(f"{name}\t{following}\n".encode())
            self._channel.flush()
            return [pytest.TestReport._from_json(each) for each in pickle.load(self._channel)]
        except (EOFError, BrokenPipeError):
            status = self._process.wait()
            self._output.seek(0)
            said = self._output.read().decode(errors="replace")[-5000:]
            raise RuntimeError(f"the process with the simulated device ended with {status}: {said}") from None

    def close(self) -> None:
        """End it."""
        with suppress(BrokenPipeError):
            self._channel.close()
        self._output.close()
        self._process.wait(60)


class SimulatedDevices:
    """A plugin for pytest; registered where there is no real device."""

    def __init__(self) -> None:
        self._server: _Server | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Instead of running it here."""
        if not item.get_closest_marker("gpu"):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        try:
            self._server = self._server or _Server(item.session)
            following = nextitem.nodeid if nextitem is not None and nextitem.get_closest_marker("gpu") else ""
            reports = self._server.reports(item.nodeid, following)
        except Exception as error:
            self.pytest_sessionfinish()
            reports = [pytest.TestReport(item.nodeid, item.location, {}, "failed", str(error), "call")]
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        item.session._setupstate.teardown_exact(nextitem)
        return True

    def pytest_sessionfinish(self) -> None:
        """End the process."""
        if self._server is not None:
            self._server.close()
            self._server = None
