import pytest

from tests.gateways import finished, gateway_to, scripted_worker, started


@pytest.fixture(scope="module")
def scripted():
    """A worker whose script a test sets, and a gateway to it."""
    with (
        scripted_worker(lambda request: [started(), finished()]) as state,
        gateway_to(state.target, stall_timeout_s=0.5) as gateway,
    ):
        yield state.worker, gateway
