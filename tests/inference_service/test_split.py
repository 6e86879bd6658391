"""Which requests of an alias its canary gets."""

import subprocess
import sys

import pytest

from inference_service.split import takes_canary
from shared.registry.base import Canary

IDS = [f"request-{number}" for number in range(20_000)]


def taken(canary: Canary, *, model: str = "tiny", alias: str = "stable") -> set[str]:
    return {name for name in IDS if takes_canary(name, model, alias, canary)}


@pytest.mark.parametrize("share", [1, 10, 100, 500, 999])
def test_a_canary_gets_its_share_of_requests(share: int) -> None:
    expected = len(IDS) * share / 1000
    deviation = (len(IDS) * share / 1000 * (1 - share / 1000)) ** 0.5
    assert abs(len(taken(Canary(2, share))) - expected) <= 5 * deviation


def test_a_larger_share_includes_the_requests_of_a_smaller_one() -> None:
    assert taken(Canary(2, 100)) < taken(Canary(2, 300))


def test_the_requests_of_a_canary_depend_on_version_alias_and_model() -> None:
    here = taken(Canary(2, 100))
    for other in (taken(Canary(3, 100)), taken(Canary(2, 100), alias="other"), taken(Canary(2, 100), model="other")):
        assert 0.05 < len(here & other) / len(here) < 0.15


def test_another_process_chooses_the_same_requests() -> None:
    """Python's hash() of a string differs between processes, so it must not decide."""
    program = (
        "from shared.registry.base import Canary; from inference_service.split import takes_canary;"
        "print([n for n in range(200) if takes_canary(f'request-{n}', 'tiny', 'stable', Canary(2, 100))])"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    here = [n for n in range(200) if takes_canary(f"request-{n}", "tiny", "stable", Canary(2, 100))]
    assert told.stdout.strip() == str(here)
    assert here[:4] == [0, 2, 3, 19], "workers of different versions of neap may serve at the same time"
