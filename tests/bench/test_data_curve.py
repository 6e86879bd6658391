"""More text gives higher agreement, judged on held-out text that no ladder was trained on."""

from pathlib import Path

import pytest

from bench import data_curve as curve_module
from bench.data_curve import CurvePoint, data_curve
from calibrator_service.calibration.plan import PassSizes
from calibrator_service.calibration.spec import CalibrationSpec, SelfGenerated
from calibrator_service.calibration.states.training_data import TrainingData
from tests.calibrator_service.calibration.conftest import make_model

pytestmark = pytest.mark.full

SPEC = CalibrationSpec(
    source=SelfGenerated(max_new_tokens=24), max_tokens=5000, rung_depths=(2,), router_width=16
)


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> list[CurvePoint]:
    found, judges = [], []
    report = curve_module.held_out_report

    def recorded(run, material: TrainingData, vocabulary, ladder):  # type: ignore[no-untyped-def]
        judges.append(material)
        return report(run, material, vocabulary, ladder)

    with pytest.MonkeyPatch.context() as patch:
        scale = PassSizes(rows=160)
        patch.setattr("calibrator_service.calibration.plan.pass_sizes_for", lambda _: scale)
        patch.setattr(curve_module, "held_out_report", recorded)
        folder: Path = tmp_path_factory.mktemp("curve")
        found += data_curve(make_model(chat=False), SPEC, [5000, 600], folder)
    assert len(set(map(id, judges))) == 1
    assert sum(len(s.tokens) for s in judges[0].table_sequences["report"]) > 300
    return found


def test_more_text_gives_higher_agreement(points: list[CurvePoint]) -> None:
    few, many = points
    assert 600 <= few.tokens < many.tokens >= 5000
    assert list(few.agreement) == ["suffix", "successor", "depth-2"]
    assert many.agreement["successor"] > few.agreement["successor"] + 0.03
    assert many.agreement["depth-2"] > few.agreement["depth-2"]
    assert many.tokens_per_pass > few.tokens_per_pass


def test_rows_have_the_headers_columns(points: list[CurvePoint]) -> None:
    names, rule = points[0].header().splitlines()
    assert names.count("|") == rule.count("|") == points[0].row().count("|")
    assert points[0].row().startswith(f"| {points[0].tokens:,} | 0.")
