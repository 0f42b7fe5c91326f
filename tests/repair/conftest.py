"""Fixtures of the tests of repairs."""

import pytest

from apoptosis.repair import lockstep


@pytest.fixture(params=["in step", "by stages"])
def way(request, monkeypatch) -> str:
    """Every claim holds on both ways through the networks."""
    if request.param == "by stages":
        monkeypatch.setattr(lockstep, "MOST_BATCHES", 0)
    return request.param
