"""What changes with the device and the amount of text: how much is done at once, and how often the host waits."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import AdamW

from calibrator_service.calibration import train_heads as train_module
from calibrator_service.calibration.collect import Collector
from calibrator_service.calibration.presets import rows_together, scale_of, training
from calibrator_service.calibration.shards import TokenSequence
from calibrator_service.calibration.spec import CalibrationSpec
from calibrator_service.calibration.train_heads import (
    TrainParams,
    train_heads,
    vocabulary_lookup,
)
from shared.ladder.heads import ExitHead
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.host_syncs import HostSyncs
from shared.model.load import LoadedModel

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def on_gpu(loaded: LoadedModel, memory_bytes: int, patch: pytest.MonkeyPatch) -> Any:
    """What is asked of a model that is on a GPU with so much memory."""
    properties = SimpleNamespace(total_memory=memory_bytes)
    patch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    model = SimpleNamespace(config=loaded.model.config, dtype=torch.bfloat16)
    return SimpleNamespace(model=model, device=GPU, num_layers=loaded.num_layers)


def test_a_gpu_decodes_as_many_rows_as_fit_a_quarter_of_its_memory(
    counting: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Three layers of one head of 16 keys and values, two bytes each, for 512 tokens.
    row_bytes = 2 * 3 * 16 * 2 * 512
    few = on_gpu(counting, 4 * 300 * row_bytes, monkeypatch)
    assert rows_together(few) == 300
    assert rows_together(on_gpu(counting, 80 << 30, monkeypatch)) == 2048
    assert not scale_of(few).keeps_states
    assert rows_together(counting) == 64
    assert scale_of(counting).keeps_states


def test_more_text_is_seen_less_often_and_a_gpu_takes_more_of_it_at_once() -> None:
    def chosen(tokens: int, device: torch.device) -> tuple[int, int]:
        params = training(CalibrationSpec(max_tokens=tokens), device)
        return params.epochs, params.batch_size

    usual = (TrainParams().epochs, TrainParams().batch_size)
    assert chosen(0, GPU) == chosen(52_000, GPU) == chosen(700_000, CPU) == usual
    assert chosen(1_000_000, GPU) == (6, 1024)
    assert chosen(30_000_000, GPU) == (5, 4096)
    assert chosen(1_000_000_000, GPU) == (2, 4096)


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


def test_what_is_made_anew_is_what_would_have_been_kept(
    counting: LoadedModel, collector: Collector, tmp_path: Path
) -> None:
    """In passes of other sizes, too."""
    (path,) = collector.chunks("heads")
    keeping = Collector(
        ContiguousRunner(counting), [0, 2], tmp_path / "kept", max_state_bytes=1 << 20
    )
    generator = torch.Generator().manual_seed(0)
    for length in (9, 30, 14, 25):
        tokens = torch.randint(5, 29, (length,), generator=generator).tolist()
        keeping.add("heads", TokenSequence(tuple(tokens), 3))
    keeping.finish("heads")
    kept, anew = keeping.read(keeping.chunks("heads")[0]), collector.read(path)
    assert len(kept) == len(anew) == 9 + 30 + 14 + 25 - 4 * 3
    for name in ("rows", "room", "choices"):
        assert torch.equal(getattr(kept, name), getattr(anew, name))
    for ours, theirs in (
        (kept.deep, anew.deep),
        *((kept.states[d], anew.states[d]) for d in (0, 2)),
    ):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)


def test_training_steps_ask_the_device_for_nothing(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond what each chunk and each report cost, however many steps there are."""
    monkeypatch.setattr(train_module, "REPORT_INTERVAL_S", math.inf)  # the first step's only
    # As on a GPU: otherwise the optimiser counts its steps in tensors on the host, and reads them.
    monkeypatch.setattr(torch.optim, "AdamW", lambda *a, **k: AdamW(*a, **{**k, "fused": True}))
    heads = {depth: ExitHead("gated", 32, 32, 16) for depth in (0, 2)}
    lookup = vocabulary_lookup(torch.arange(32), 32)

    def waits(batch_size: int) -> list[str]:
        told: list[float] = []
        with HostSyncs() as mode:
            train_heads(
                heads, collector.chunks("heads"), torch.randn(32, 32), None, lookup,
                replace(TrainParams(), epochs=1, batch_size=batch_size),
                read=collector.read, on_step=lambda done, _: told.append(done),
            )  # fmt: skip
        assert len(told) == 1
        return mode.found

    # The same chunk, the same one report: 33 steps wait no more often than two.
    assert sorted(waits(2)) == sorted(waits(33))
