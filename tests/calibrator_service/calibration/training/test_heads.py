"""Training of exit heads: on stored or recomputed states, and without synchronising with the device at each step."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW

from calibrator_service.calibration.plan import HeadTraining
from calibrator_service.calibration.states.collect import Collector
from calibrator_service.calibration.text.shards import TokenSequence
from calibrator_service.calibration.training import heads as train_module
from calibrator_service.calibration.training.chain_outputs import gather_chains
from calibrator_service.calibration.training.draft_vocabulary import DraftVocabulary
from calibrator_service.calibration.training.heads import train_heads
from calibrator_service.calibration.training.objectives import ChainObjective, make_teacher
from shared.ladder.exit_head import ExitHead, unit
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import LoadedModel
from shared.model.recorder import HostSyncs
from shared.model.runner import captured_depths


@pytest.fixture
def collector(counting: LoadedModel, tmp_path: Path) -> Collector:
    mine = Collector(
        ContiguousRunner(counting), [0, 1, 2], tmp_path, max_state_bytes=0, keeps_states=False, pass_tokens=64
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
    keeping = Collector(ContiguousRunner(counting), [0, 2], tmp_path / "kept", max_state_bytes=1 << 20)
    generator = torch.Generator().manual_seed(0)
    for length in (9, 30, 14, 25):
        tokens = torch.randint(5, 29, (length,), generator=generator).tolist()
        keeping.add("heads", TokenSequence(tuple(tokens), 3))
    keeping.finish("heads")
    (kept,) = keeping.chunks("heads")
    assert len(kept) == len(recomputed) == 9 + 30 + 14 + 25 - 4 * 3
    for name in ("rows", "choices"):
        assert torch.equal(getattr(kept, name), getattr(recomputed, name))
    for ours, theirs in ((kept.deep, recomputed.deep), *((kept.states[d], recomputed.states[d]) for d in (0, 2))):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)


@pytest.mark.full
def test_training_steps_do_not_synchronise_with_the_device(collector, monkeypatch):
    """Only each chunk and each report synchronises; the number of steps does not matter."""
    monkeypatch.setattr(train_module, "REPORT_INTERVAL_S", math.inf)  # the first step's only
    # As on a GPU: otherwise the optimiser counts its steps in tensors on the host, and reads them.
    monkeypatch.setattr(torch.optim, "AdamW", lambda *a, **k: AdamW(*a, **{**k, "fused": True}))
    heads = {depth: ExitHead(32, 16) for depth in (0, 2)}
    vocabulary = DraftVocabulary(torch.arange(32), torch.randn(32, 32), None, torch.arange(32))

    def waits(batch_size: int) -> list[str]:
        told: list[float] = []
        with HostSyncs() as mode:
            train_heads(
                heads, collector.chunks("heads"), vocabulary,
                HeadTraining(epochs=1, batch_size=batch_size),
                ChainObjective(heads, vocabulary, 3, None),
                on_step=lambda done, _: told.append(done),
            )  # fmt: skip
        assert len(told) == 1
        return mode.syncs

    # The same chunk, the same one report: 33 steps wait no more often than two.
    assert sorted(waits(2)) == sorted(waits(33))


def test_the_first_loss_that_is_shown_is_the_first_steps(collector, monkeypatch):
    """A running mean that began with zero would rise at first, however well the heads learned."""
    monkeypatch.setattr(train_module, "REPORT_INTERVAL_S", 0.0)
    heads = {0: ExitHead(32, 16)}
    vocabulary = DraftVocabulary(torch.arange(32), torch.randn(32, 32), None, torch.arange(32))
    objective = ChainObjective(heads, vocabulary, 3, None)
    own, shown = [], []

    class Kept:
        def losses(self, *batch: Any) -> dict[int, torch.Tensor]:
            found = objective.losses(*batch)
            own.append(float(found[0].detach()))
            return found

    train_heads(
        heads, collector.chunks("heads"), vocabulary, HeadTraining(epochs=1, batch_size=8),
        Kept(), on_step=lambda _, losses: shown.append(losses["depth-0.loss"]),
    )  # fmt: skip
    assert len(shown) == len(own) > 3
    assert shown[0] == pytest.approx(own[0])
    assert min(own) <= min(shown) <= max(shown) <= max(own)


class Killed(BaseException):
    """Stands for the death of the process: no handler may catch it."""


def test_a_killed_training_continues_to_the_same_weights(counting, tmp_path, monkeypatch):
    """With the optimiser's state, chunk by chunk."""
    monkeypatch.setattr("calibrator_service.calibration.training.heads.SAVE_INTERVAL_S", 0.0)
    runner = ContiguousRunner(counting)
    collector = Collector(runner, [0, *captured_depths(3)], tmp_path, max_state_bytes=1 << 20, chunk_positions=30)
    for row in torch.randint(5, 29, (9, 20)).tolist():
        collector.add("heads", TokenSequence(tuple(row), 3))
    chunks = collector.chunks("heads")
    assert len(chunks) > 2
    vocabulary = DraftVocabulary.of(counting, torch.arange(32))

    def trained(dies_at: float = 2.0) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        heads = {0: ExitHead(32, 16)}
        objective = ChainObjective(heads, vocabulary, 3, make_teacher(runner, vocabulary))

        def on_step(done: float, _: object) -> None:
            if done >= dies_at:
                raise Killed

        train_heads(
            heads, chunks, vocabulary, HeadTraining(epochs=3, batch_size=8), objective,
            checkpoint=tmp_path / "checkpoint", on_step=on_step,
        )  # fmt: skip
        return heads[0].state_dict()

    monkeypatch.setattr(train_module, "REPORT_INTERVAL_S", 0.0)
    whole = trained()
    for dies_at in (0.3, 0.7):
        with pytest.raises(Killed):
            trained(dies_at)
        assert (tmp_path / "checkpoint").exists()
    continued = trained()
    assert all(torch.equal(whole[name], continued[name]) for name in whole)
    assert not (tmp_path / "checkpoint").exists()


def test_the_teacher_is_the_full_model(counting, tmp_path):
    runner = ContiguousRunner(counting)
    collector = Collector(runner, [0], tmp_path, max_state_bytes=1 << 20)
    tokens = torch.randint(5, 29, (12,))
    collector.add("heads", TokenSequence(tuple(tokens.tolist()), 4))
    collector.finish("heads")
    [chunk] = collector.chunks("heads")
    vocabulary = DraftVocabulary.of(counting, torch.arange(0, 32, 3))
    teacher = make_teacher(runner, vocabulary)
    assert teacher is not None
    own = counting.model(tokens[None]).logits[0, 3:-1, ::3]
    torch.testing.assert_close(teacher(chunk.deep[chunk.rows]), own, rtol=0.01, atol=0.02)


def test_a_chain_begins_behind_its_settled_prefix_and_ends_with_the_sequence(counting, tmp_path):
    runner = ContiguousRunner(counting)
    low, middle = captured_depths(3)
    collector = Collector(runner, [0, low, middle], tmp_path, max_state_bytes=1 << 20)
    rows = torch.randint(5, 29, (2, 12))
    for row in rows.tolist():
        collector.add("heads", TokenSequence(tuple(row), 4))
    collector.finish("heads")
    [chunk] = collector.chunks("heads")
    captured = runner.capture(rows, [0, low, middle, 3])
    index = torch.tensor([0, 6, 8])  # positions 3 and 9 of the first sequence, 3 of the second
    batch = gather_chains(chunk, index, 3, [0], (low, middle), torch.arange(32), torch.device("cpu"))
    assert batch.exists.T.tolist() == [[True] * 3, [True, True, False], [True] * 3]
    assert (batch.choices >= 0).equal(batch.exists)
    for column, (row, position) in enumerate([(0, 3), (0, 9), (1, 3)]):
        for place, depth in enumerate((low, middle, 3)):
            expected = unit(captured[depth][row, position - 1])
            torch.testing.assert_close(batch.states[column, place], expected, rtol=0, atol=2e-3)
        for step in range(3 if position == 3 else 2):
            entering = unit(captured[0][row, position + step])
            torch.testing.assert_close(batch.entering[0][step, column], entering, rtol=0, atol=2e-3)
            assert batch.choices[step, column] == rows[row, position + step + 1]
