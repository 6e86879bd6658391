import pytest

from tests.fixed_costs import fix_costs


@pytest.fixture(autouse=True)
def _fixed_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the planner decides must not depend on how fast this machine is today."""
    fix_costs(monkeypatch)
