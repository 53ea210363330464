"""Tests on a real Slurm cluster: see `tests/kit/slurm.py`."""

from __future__ import annotations

import pytest
from _pytest.runner import runtestprotocol

from tests.kit.slurm import Cluster, cluster, cluster_of_session

__all__ = ["cluster", "cluster_of_session"]


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test on the cluster again, once, when it failed while a daemon of Slurm itself broke down: that is a node's
    failure which the test did not ask for. It is said, and a second failure counts."""
    if "cluster" not in getattr(item, "fixturenames", ()):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    before = _crashes(item)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    if any(report.failed for report in reports) and (new := _crashes(item)[len(before) :]):
        print(f"\n{item.nodeid}: run again, for a daemon of Slurm broke down by itself: {new[0]}")
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _crashes(item: pytest.Item) -> list[str]:
    """What daemons of the session's cluster have said so far, if there is one yet."""
    found = getattr(item.session, "slurm_cluster", None)
    return found.crashes() if isinstance(found, Cluster) else []
