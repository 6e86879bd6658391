"""Specs between proto and dataclass."""

import pytest
from google.protobuf.duration_pb2 import Duration
from neap.calibration.v1 import calibration_pb2 as pb

from calibrator_service.convert import spec_from_proto, spec_to_proto


@pytest.mark.parametrize("nanoseconds", [1, 1_900_000_000, 150_000_000_001])
def test_a_time_budget_keeps_its_fractions(nanoseconds: int) -> None:
    budget = Duration()
    budget.FromNanoseconds(nanoseconds)
    given = pb.CalibrationSpec(
        model_id="tiny", self_generated=pb.SelfGenerated(), time_budget=budget
    )
    spec = spec_from_proto(given)
    assert spec.time_budget_s == pytest.approx(nanoseconds / 1e9)
    assert spec_to_proto(spec, []).time_budget == budget
