"""What keeps a router from being promoted."""

import json
from pathlib import Path

import pytest

from shared.ladder.checks import check_packed
from shared.ladder.folder import read_packed
from shared.registry.contents import failed_checks

SHIPPED = Path(__file__).resolve().parents[3] / "bench" / "router"


@pytest.fixture
def packed():
    manifest, blobs = read_packed(SHIPPED)
    return json.loads(json.dumps(manifest)), blobs


def test_the_shipped_router_passes(packed):
    checks = check_packed(*packed)
    assert set(checks) == {"unpacks", "figures", "routers"}
    assert failed_checks({"checks": checks}) == []


def test_bytes_that_do_not_unpack(packed):
    manifest, blobs = packed
    cut = {name: data[:-1] for name, data in blobs.items()}
    checks = check_packed(manifest, cut)
    assert checks["unpacks"] == {"passed": False, "detail": "CORRUPT"}


def test_a_router_worse_than_guessing(packed):
    manifest, blobs = packed
    manifest["rungs"][-1]["figures"]["router_brier"] = 0.4
    name = manifest["rungs"][-1]["name"]
    assert check_packed(manifest, blobs)["routers"] == {"passed": False, "detail": name}


def test_figures_that_are_no_numbers(packed):
    manifest, blobs = packed
    manifest["rungs"][0]["figures"]["router_auc"] = float("nan")
    assert failed_checks({"checks": check_packed(manifest, blobs)}) == ["figures"]


def test_a_record_that_says_nothing_clear_has_not_passed():
    assert failed_checks({"checks": {"a": {"passed": 1}, "b": True, "c": {"passed": True}}}) == [
        "a",
        "b",
    ]
    assert failed_checks({"checks": "all fine"}) == ["checks"]
    assert failed_checks({}) == []
