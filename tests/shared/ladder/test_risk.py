"""The published risk of the policy `relaxed`."""

import pytest

from shared.errors import Corrupt
from shared.ladder.risk import MAX_BOUNDS, PublishedRisk

TABLE = {
    "loss": "generation_differs",
    "delta": 0.05,
    "num_prompts": 400,
    "bounds": [{"threshold": 0.9, "epsilon": 0.2}, {"threshold": 0.97, "epsilon": 0.05}],
}


def test_the_smallest_epsilon_that_holds_at_a_threshold() -> None:
    risk = PublishedRisk.of({"risk": TABLE})
    assert risk is not None
    assert risk.delta == 0.05
    asked = (0.85, 0.9, 0.95, 0.97, 1.0)
    assert [risk.epsilon_at(threshold) for threshold in asked] == [None, 0.2, 0.2, 0.05, 0.05]


def test_the_smallest_epsilon_that_holds_at_a_margin() -> None:
    bounds = [{"margin": 0.1, "epsilon": 0.05}, {"margin": 1.5, "epsilon": 0.2}]
    manifest = {"risk": TABLE, "margin_risk": {**TABLE, "bounds": bounds}}
    risk = PublishedRisk.of(manifest, "margin")
    assert risk is not None
    assert [risk.epsilon_at(margin) for margin in (0.0, 0.1, 0.11, 1.5, 1.6)] == [0.05, 0.05, 0.2, 0.2, None]
    assert PublishedRisk.of({"risk": TABLE}, "margin") is None
    for damaged in (0, -1.0, float("inf"), float("nan"), True):
        bad = {"margin_risk": {**TABLE, "bounds": [{"margin": damaged, "epsilon": 0.1}]}}
        with pytest.raises(Corrupt):
            PublishedRisk.of(bad, "margin")


def test_a_manifest_without_a_risk() -> None:
    assert PublishedRisk.of({"rungs": []}) is None


@pytest.mark.parametrize(
    "change",
    [
        {"loss": "tokens"},
        {"delta": 0},
        {"bounds": []},
        {"bounds": [{"threshold": 0.9}]},
        {"bounds": [{"threshold": 0.9, "epsilon": 1.0}]},
        {"bounds": [{"threshold": 0.9, "epsilon": float("nan")}]},
        {"bounds": [{"threshold": 0.9, "epsilon": 0.1}] * (MAX_BOUNDS + 1)},
        {"bounds": "none"},
    ],
)
def test_a_table_with_an_invalid_field_is_refused(change: dict) -> None:
    with pytest.raises(Corrupt):
        PublishedRisk.of({"risk": {**TABLE, **change}})


def test_a_risk_that_is_not_a_table_is_refused() -> None:
    with pytest.raises(Corrupt):
        PublishedRisk.of({"risk": 7})


def test_the_number_of_tokens_covered():
    assert PublishedRisk.of({"risk": TABLE}).num_tokens is None
    assert PublishedRisk.of({"risk": {**TABLE, "max_new_tokens": 128}}).num_tokens == 128
    for damaged in (0, -1, 1.5, True, "128"):
        with pytest.raises(Corrupt):
            PublishedRisk.of({"risk": {**TABLE, "max_new_tokens": damaged}})


@pytest.mark.parametrize(
    ("served", "holds"),
    [
        (("float32", "float32", "cpu"), True),
        (("bfloat16", "float32", "cpu"), False),
        (("float32", "bfloat16", "cpu"), False),
        (("float32", "float32", "cuda"), False),
    ],
)
def test_a_bound_holds_for_the_engine_for_which_it_was_certified(served, holds: bool) -> None:
    certified = PublishedRisk.of({"risk": {**TABLE, "engine": {"dtype": "float32", "device": "cpu"}}})
    anywhere = PublishedRisk.of({"risk": TABLE})
    assert certified is not None
    assert anywhere is not None
    assert certified.holds_in(*served) == holds
    assert anywhere.holds_in(*served)


def test_a_bound_may_be_certified_with_rounded_matmuls() -> None:
    engine = {"dtype": "float32", "compute_dtype": "bfloat16", "device": "cpu"}
    certified = PublishedRisk.of({"risk": {**TABLE, "engine": engine}})
    assert certified is not None
    assert certified.holds_in("float32", "bfloat16", "cpu")
    assert not certified.holds_in("float32", "float32", "cpu")
    assert not certified.holds_in("bfloat16", "bfloat16", "cpu")
    with pytest.raises(Corrupt):
        PublishedRisk.of({"risk": {**TABLE, "engine": {**engine, "compute_dtype": 16}}})
