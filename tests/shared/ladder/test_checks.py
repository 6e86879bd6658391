"""The checks that a router must pass before it can be promoted."""

import json
from pathlib import Path

import pytest

from shared.ladder.checks import check_artefact
from shared.ladder.folder import read_router_folder
from shared.registry.contents import failed_checks

SHIPPED = Path(__file__).resolve().parents[3] / "bench" / "router"


@pytest.fixture
def packed():
    manifest, blobs = read_router_folder(SHIPPED)
    return json.loads(json.dumps(manifest)), blobs


def test_the_shipped_router_passes(packed):
    checks = check_artefact(*packed)
    assert set(checks) == {"unpacks", "figures", "confidence"}
    assert failed_checks({"checks": checks}) == []


def test_a_truncated_blob_fails_unpacks(packed):
    manifest, blobs = packed
    truncated = {name: data[:-1] for name, data in blobs.items()}
    checks = check_artefact(manifest, truncated)
    assert checks["unpacks"] == {"passed": False, "detail": "CORRUPT"}


def test_a_router_worse_than_guessing_fails_routers(packed):
    manifest, blobs = packed
    manifest["proposers"][-1]["figures"]["confidence_brier"] = 0.4
    name = manifest["proposers"][-1]["name"]
    assert check_artefact(manifest, blobs)["confidence"] == {"passed": False, "detail": name}


def test_a_figure_that_is_not_finite_fails_figures(packed):
    manifest, blobs = packed
    manifest["proposers"][0]["figures"]["confidence_auc"] = float("nan")
    assert failed_checks({"checks": check_artefact(manifest, blobs)}) == ["figures"]


def test_a_malformed_record_counts_as_failed():
    assert failed_checks({"checks": {"a": {"passed": 1}, "b": True, "c": {"passed": True}}}) == ["a", "b"]
    assert failed_checks({"checks": "all fine"}) == ["checks"]
    assert failed_checks({}) == []
