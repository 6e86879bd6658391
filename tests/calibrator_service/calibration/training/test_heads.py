"""Training of exit heads: on stored or recomputed states, and without synchronising with the device at each step."""

import math
from pathlib import Path

import pytest
import torch
from torch.optim import AdamW

from calibrator_service.calibration.plan import HeadTraining
from calibrator_service.calibration.states.collect import Collector
from calibrator_service.calibration.text.shards import TokenSequence
from calibrator_service.calibration.training import heads as train_module
from calibrator_service.calibration.training.draft_vocabulary import DraftVocabulary
from calibrator_service.calibration.training.heads import train_heads
from calibrator_service.calibration.training.objectives import OneStepObjective
from shared.ladder.heads import ExitHead
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.host_syncs import HostSyncs
from shared.model.load import LoadedModel


@pytest.fixture
def collector(counting: LoadedModel, tmp_path: Path) -> Collector:
    mine = Collector(
        ContiguousRunner(counting), [0, 2], tmp_path, max_state_bytes=0, keeps_states=False, pass_tokens=64
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for length in (9, 30, 14, 25):
        tokens = torch.randint(5, 29, (length,), generator=generator).tolist()
        mine.add("heads", TokenSequence(tuple(tokens), 3))
    mine.finish("heads")
    return mine


def test_recomputed_states_equal_stored_ones(counting, collector, tmp_path):
    """Also if the passes have other sizes."""
    (recomputed,) = collector.chunks("heads")
    keeping = Collector(
        ContiguousRunner(counting), [0, 2], tmp_path / "kept", max_state_bytes=1 << 20
    )
    generator = torch.Generator().manual_seed(0)
    for length in (9, 30, 14, 25):
        tokens = torch.randint(5, 29, (length,), generator=generator).tolist()
        keeping.add("heads", TokenSequence(tuple(tokens), 3))
    keeping.finish("heads")
    (kept,) = keeping.chunks("heads")
    assert len(kept) == len(recomputed) == 9 + 30 + 14 + 25 - 4 * 3
    for name in ("rows", "num_before", "choices"):
        assert torch.equal(getattr(kept, name), getattr(recomputed, name))
    for ours, theirs in (
        (kept.deep, recomputed.deep),
        *((kept.states[d], recomputed.states[d]) for d in (0, 2)),
    ):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)


def test_training_steps_do_not_synchronise_with_the_device(collector, monkeypatch):
    """Only each chunk and each report synchronises; the number of steps does not matter."""
    monkeypatch.setattr(train_module, "REPORT_INTERVAL_S", math.inf)  # the first step's only
    # As on a GPU: otherwise the optimiser counts its steps in tensors on the host, and reads them.
    monkeypatch.setattr(torch.optim, "AdamW", lambda *a, **k: AdamW(*a, **{**k, "fused": True}))
    heads = {depth: ExitHead("gated", 32, 32, 16) for depth in (0, 2)}
    vocabulary = DraftVocabulary(torch.arange(32), torch.randn(32, 32), None, torch.arange(32))

    def waits(batch_size: int) -> list[str]:
        told: list[float] = []
        with HostSyncs() as mode:
            train_heads(
                heads, collector.chunks("heads"), vocabulary,
                HeadTraining(epochs=1, batch_size=batch_size),
                OneStepObjective(heads, vocabulary),
                on_step=lambda done, _: told.append(done),
            )  # fmt: skip
        assert len(told) == 1
        return mode.found

    # The same chunk, the same one report: 33 steps wait no more often than two.
    assert sorted(waits(2)) == sorted(waits(33))
