"""Code that was written for TIDE runs on neap, and gives the full model's answers."""

from pathlib import Path

import pytest
import torch

from calibrator_service.calibration.pipeline import CalibrationResult
from calibrator_service.calibration.spec import CalibrationSpec, HubDataset, TextFile
from neap_engine import tide
from neap_engine.tide import TIDE, TIDEConfig, calibrate
from shared.errors import InvalidInput
from shared.ladder.policy import DepthPolicy
from shared.model.loaded import wrap_model
from tests.fixed_costs import fixed_cost_engine
from tests.random_ladder import random_ladder
from tests.worker import build_model, build_tokenizer

PROMPT = torch.tensor([[260, 220, 260, 220, 260, 220, 257]])


@pytest.fixture
def router(tmp_path: Path) -> Path:
    """A router's folder. Nothing was trained."""
    ladder = random_ladder(wrap_model(build_model()), 3)
    figures = {name: {"agreement": 0.9} for name in ladder.proposer_names}
    CalibrationResult(ladder, {"proposers": figures}).save(tmp_path / "router")
    return tmp_path / "router"


def test_generate_gives_the_answer_of_transformers_and_counts_it(router):
    expected = build_model().generate(PROMPT, max_new_tokens=12, do_sample=False)
    with TIDE(build_model(), router) as engine:
        assert engine.last_stats is None
        found = engine.generate(PROMPT, max_new_tokens=12, temperature=0)
        assert torch.equal(found, expected)
        assert engine.last_stats.total_tokens == found.shape[1] - PROMPT.shape[1]
        assert "left early" in engine.last_stats.summary()
        assert engine.generate(PROMPT, max_new_tokens=3).shape == (1, PROMPT.shape[1] + 3)


def test_a_model_serves_one_engine_after_another(router):
    model = build_model()
    for _ in range(2):
        with TIDE(model, router, TIDEConfig(exit_threshold=0.9)) as engine:
            engine.generate(PROMPT, max_new_tokens=2, temperature=0)


@pytest.fixture
def _drafting_pays(monkeypatch):
    monkeypatch.setattr(tide, "Engine", fixed_cost_engine)


def answer_of(router, **config):
    """(answer, its statistics) of a script of TIDE's with this configuration, for a fresh model."""
    with TIDE(build_model(), router, TIDEConfig(**config)) as engine:
        return engine.generate(PROMPT, max_new_tokens=24, temperature=0), engine.last_stats


@pytest.mark.usefixtures("_drafting_pays")
def test_an_exit_threshold_lets_sure_tokens_leave(router):
    exact, stats = answer_of(router)
    for threshold, differs in ((0.85, True), (1.0, False)):
        found, stats = answer_of(router, exit_threshold=threshold)
        assert found.shape == exact.shape
        assert torch.equal(found, exact) != differs
        assert stats.total_tokens == 24
        assert (stats.exit_rate > 0) == differs


@pytest.mark.usefixtures("_drafting_pays")
def test_min_layers_keeps_shallow_exits_out(router):
    exact, _ = answer_of(router)
    assert torch.equal(answer_of(router, min_layers=2)[0], exact)
    for min_layers, depths in ((0, {0, 2}), (2, {2})):
        _, stats = answer_of(router, exit_threshold=0.05, min_layers=min_layers)
        assert set(stats.exits_per_layer) == depths
        assert stats.total_tokens == 24


def test_a_calibration_saves_what_the_engine_reads(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("the hen in the inn says hello to the thin hen " * 250)
    monkeypatch.setattr(tide, "WIKITEXT", TextFile(str(tmp_path / "text.txt")))
    config = TIDEConfig(calibration_dataset="wikitext", calibration_samples=4)
    model = build_model()
    calibrate(model, build_tokenizer(), config, tmp_path / "router")
    with TIDE(model, tmp_path / "router") as engine:
        engine.generate(PROMPT, max_new_tokens=4, temperature=0)


def test_a_calibration_of_few_samples_writes_little_text_and_shows_its_progress(tmp_path, monkeypatch, capsys):
    """A sample is 512 tokens. The prompts are written as well, and whole batches, so there are a few times as many."""
    seen = []
    monkeypatch.setattr(tide.ProgressLine, "__call__", _noting(tide.ProgressLine.__call__, seen))
    config = TIDEConfig(calibration_samples=1)
    calibrate(build_model(), build_tokenizer(), config, tmp_path / "router")
    figures = seen[-1].figures
    assert figures["generated_tokens"] <= 4 * 512
    assert "calibrating: 100%, publishing" in capsys.readouterr().err


def test_a_calibration_has_a_limit(tmp_path, monkeypatch):
    specs = []

    def note(loaded, spec, **_):
        specs.append(spec)
        return CalibrationResult(random_ladder(loaded, 0), {})

    monkeypatch.setattr(tide, "calibrate_ladder", note)
    config = TIDEConfig(calibration_samples=2)
    calibrate(build_model(), build_tokenizer(), config, tmp_path / "router", time_budget_s=9)
    assert specs == [CalibrationSpec(max_tokens=1024, time_budget_s=9)]


def _noting(show, seen):
    def call(self, progress):
        seen.append(progress)
        show(self, progress)

    return call


def test_fields_mean_what_the_document_says():
    assert TIDEConfig().policy == DepthPolicy("exact")
    assert TIDEConfig(exit_threshold=0.7, min_layers=2).policy == DepthPolicy("relaxed", threshold=0.7, min_layers=2)
    assert TIDEConfig().spec(30) == CalibrationSpec()
    config = TIDEConfig(
        checkpoint_interval=4,
        calibration_samples=10,
        calibration_dataset="wikitext",
        convergence_threshold=0.9,
        router_bottleneck_dim=64,
    )
    assert config.spec(12) == CalibrationSpec(
        source=HubDataset("Salesforce/wikitext", config="wikitext-103-raw-v1"),
        max_tokens=5120,
        exit_depths=(4, 8),
        label="cosine",
        cosine_threshold=0.9,
        confidence_width=64,
    )
    assert TIDEConfig(calibration_dataset="a/b").spec(12).source == HubDataset("a/b")


@pytest.mark.parametrize("field", tide.WITHOUT_EFFECT)
def test_fields_without_an_effect_in_tide_cannot_be_set(field):
    with pytest.raises(InvalidInput) as raised:
        TIDEConfig(**{field: 0.5})
    assert raised.value.metadata == {"option": field}
