"""A plugin for pytest in the process that sees the device: runs the tests that it is asked for, and sends back their reports."""

from __future__ import annotations

import os
import pickle
import socket

import pytest

_channel = socket.socket(fileno=int(os.environ["SIMULATED_CHANNEL"])).makefile("rwb")
_reports: list[dict[str, object]] = []


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    items = {item.nodeid: item for item in session.items}
    for line in _channel:
        name, following = line.decode().rstrip("\n").split("\t")
        item = items[name]
        item.user_properties.append(("simulated", True))
        item.ihook.pytest_runtest_protocol(item=item, nextitem=items.get(following))
        pickle.dump(_reports, _channel)
        _channel.flush()
        _reports.clear()
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _reports.append(report._to_json())
