"""Conversion of specs and published routers to and from protos."""

from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from neap_client.calibration.v1 import calibration_pb2 as pb

from calibrator_service.convert import version_to_proto
from calibrator_service.spec_messages import as_asked, read_spec, spec_from_proto, stored_spec
from shared.ladder.artefact import pack_ladder
from shared.model.loaded import wrap_model
from shared.registry.base import PublishedVersion
from tests.families import build_family
from tests.random_ladder import random_ladder


@pytest.mark.parametrize("nanoseconds", [1, 1_900_000_000, 150_000_000_001])
def test_a_time_budget_keeps_its_fractions(nanoseconds: int) -> None:
    budget = Duration()
    budget.FromNanoseconds(nanoseconds)
    given = pb.CalibrationSpec(model_id="tiny", self_generated=pb.SelfGenerated(), time_budget=budget)
    assert spec_from_proto(given).time_budget_s == pytest.approx(nanoseconds / 1e9)
    assert read_spec(stored_spec(given)[0], "cal-1")[0].time_budget == budget


def test_a_request_may_ask_for_workers_and_the_stored_spec_keeps_it() -> None:
    for uses in (False, True):
        source = pb.SelfGenerated(prompts=["a"], use_workers=uses)
        message = pb.CalibrationSpec(model_id="tiny", self_generated=source)
        stored, prompts = stored_spec(message)
        assert not read_spec(stored, "cal-1")[0].self_generated.prompts
        assert read_spec(stored + prompts, "cal-1") == (message, spec_from_proto(message))


def test_only_what_was_looked_up_is_no_part_of_what_was_asked() -> None:
    def asked(**parent: Any) -> bytes:
        return as_asked(pb.CalibrationSpec(parent=pb.ParentRouter(**parent)).SerializeToString())

    assert asked(alias="a", version=3, manifest_digest="x") == asked(alias="a") != asked(alias="b")
    assert asked(version=3, manifest_digest="x") == asked(version=3) != asked(version=4)


def test_figures_of_a_packed_ladder_are_converted() -> None:
    """With the manifest that `pack_ladder` writes, not one that was checked in."""
    loaded = wrap_model(build_family("llama"))
    figures = {"agreement": 0.5, "confidence_auc": 0.75, "confidence_brier": 0.125}
    figures |= {"confidence_precision": 0.875, "coverage": 1.0}
    report = {"proposers": {"depth-2": figures, "depth-0": {**figures, "confidence_auc": None}}}
    manifest, blobs = pack_ladder(random_ladder(loaded, seed=0), report)
    published = PublishedVersion("tiny", 1, "sha256:0", 0.0, len(blobs), manifest)
    told = version_to_proto(published, with_manifest=False)
    assert told.model_fingerprint == loaded.fingerprint
    shallow, deep = told.proposers
    assert (shallow.name, shallow.depth, shallow.confidence_auc) == ("depth-0", 0, 0.0)
    assert (deep.name, deep.depth) == ("depth-2", 2)
    assert {name: getattr(deep, name) for name in figures} == figures
