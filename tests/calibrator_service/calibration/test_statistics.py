"""Statistics of two calibrations add to those of one on everything, and nothing but what was written is read back."""

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from calibrator_service.calibration import statistics as module
from calibrator_service.calibration.states.moments import Moments, MomentsLayout
from calibrator_service.calibration.states.ngram_builder import NgramTableBuilder
from calibrator_service.calibration.statistics import Statistics, read_statistics, tokenizer_digest
from shared.errors import Corrupt, PreconditionFailed, RouterMismatch
from shared.model.loaded import LoadedModel

LAYOUT = MomentsLayout(hidden_size=4, depth=0, kept_depths=(0, 2))


def statistics_of(seed: int, layout: MomentsLayout = LAYOUT) -> Statistics:
    generator = torch.Generator().manual_seed(seed)
    moments = Moments(layout)
    states = torch.randn(50, layout.width, generator=generator)
    moments.second.addmm_(states.T, states)
    moments.targets.addmm_(states.T, torch.randn(50, 2 * layout.hidden_size, generator=generator))
    moments.count = 50.0
    ngrams = NgramTableBuilder()
    tokens = np.random.default_rng(seed).integers(0, 9, 60)
    ngrams.add(tokens[:-1], tokens[1:])
    counts = torch.bincount(torch.from_numpy(tokens), minlength=9).double()
    learned = torch.tensor([seed, 100])
    return Statistics("sha256:f", "", {0: moments}, ngrams, counts, 60.0, learned)


def written(statistics: Statistics, path: Path) -> Path:
    data = statistics.to_bytes()
    assert data is not None
    path.write_bytes(data)
    return path


def assert_equal(one: Statistics, two: Statistics) -> None:
    assert one.to_bytes() == two.to_bytes()


def test_what_is_read_is_what_was_written(tmp_path):
    own = statistics_of(1)
    assert_equal(read_statistics(written(own, tmp_path / "s")), own)


def test_a_grandchild_has_each_text_once(tmp_path):
    first, second, third = (statistics_of(seed) for seed in (1, 2, 3))
    before = first.to_bytes()
    child = second.plus(read_statistics(written(first, tmp_path / "first")), 1.0)
    grandchild = third.plus(read_statistics(written(child, tmp_path / "child")), 1.0)
    total = sum(s.moments[0].second for s in (first, second, third))
    torch.testing.assert_close(grandchild.moments[0].second, total)
    assert grandchild.moments[0].count == 150.0
    assert grandchild.num_tokens == 180.0
    assert grandchild.choice_counts.sum() == 180.0
    counts = [tensor for name, tensor in grandchild.ngrams.to_tensors().items() if "1.c" in name]
    assert counts[0].sum() == 3 * 59
    assert grandchild.generation == 2
    assert grandchild.learned.tolist() == [1, 2, 3, 100]
    assert first.to_bytes() == before, "the parent has not changed"


def test_a_share_of_the_parent():
    child = statistics_of(2).plus(statistics_of(1), 0.5)
    half = statistics_of(2).moments[0].second + 0.5 * statistics_of(1).moments[0].second
    torch.testing.assert_close(child.moments[0].second, half)
    assert (child.num_tokens, child.moments[0].count) == (90.0, 75.0)
    assert child.choice_counts.sum() == 90.0


@pytest.mark.parametrize(
    "layout", [replace(LAYOUT, depth=1), replace(LAYOUT, kept_depths=(0, 1)), replace(LAYOUT, hidden_size=8)]
)
def test_sums_of_other_states_are_refused(layout, counting: LoadedModel):
    parent = replace(statistics_of(1, layout), fingerprint=counting.fingerprint, tokenizer=tokenizer_digest(counting))
    parent = replace(parent, moments={layout.depth: parent.moments[0]})
    with pytest.raises(PreconditionFailed) as raised:
        statistics_of(2).plus(parent, 1.0)
    assert raised.value.reason == "LAYOUT_MISMATCH"
    with pytest.raises(PreconditionFailed) as raised:
        parent.check(counting, {0: LAYOUT})
    assert raised.value.reason == "LAYOUT_MISMATCH"


def test_another_model_or_tokenizer_is_refused(counting: LoadedModel):
    own = replace(statistics_of(1), fingerprint=counting.fingerprint, tokenizer=tokenizer_digest(counting))
    own.check(counting, {0: LAYOUT})
    with pytest.raises(RouterMismatch) as raised:
        replace(own, fingerprint="sha256:other").check(counting, {0: LAYOUT})
    assert raised.value.reason == "ROUTER_MISMATCH"
    with pytest.raises(RouterMismatch) as raised:
        replace(own, tokenizer="sha256:other").check(counting, {0: LAYOUT})
    assert raised.value.reason == "TOKENIZER_MISMATCH"


def test_statistics_above_the_limit_are_not_packed(monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    assert statistics_of(1).to_bytes() is None


def _edit(path: Path, change: Callable[[dict, dict], object]) -> None:
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["neap"])
    tensors = load(data)
    change(header, tensors)
    path.write_bytes(save(tensors, metadata={"neap": json.dumps(header)}))


DAMAGES: dict[str, Callable[[dict, dict], object]] = {
    "no counts": lambda h, t: t.pop("choice_counts"),
    "one tensor more": lambda h, t: t.update(more=torch.zeros(1)),
    "negative counts": lambda h, t: t["choice_counts"].neg_(),
    "counts that are no numbers": lambda h, t: t["choice_counts"].fill_(float("nan")),
    "states that are no numbers": lambda h, t: t["depth-0.second"].fill_(float("nan")),
    "endless targets": lambda h, t: t["depth-0.targets"].fill_(float("inf")),
    "another width": lambda h, t: h.update(exits=[[0, 5, [0, 2]]]),
    "a width of nothing": lambda h, t: h.update(exits=[[0, 0, [0, 2]]]),
    "a huge width": lambda h, t: h.update(exits=[[0, 10**9, [0, 2]]]),
    "no exits": lambda h, t: h.update(exits=[]),
    "exits of text": lambda h, t: h.update(exits="depth-0"),
    "tokens that are no number": lambda h, t: h.update(num_tokens="many"),
    "fewer tokens than none": lambda h, t: h.update(num_tokens=-1),
    "no fingerprint": lambda h, t: h.pop("fingerprint"),
    "a smaller vocabulary": lambda h, t: t.update(choice_counts=torch.zeros(3).double()),
    "narrow digests": lambda h, t: t.update(learned=t["learned"].int()),
}


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_damaged_statistics_are_refused(damage, tmp_path):
    path = written(statistics_of(1), tmp_path / "s")
    _edit(path, DAMAGES[damage])
    with pytest.raises(Corrupt):
        read_statistics(path)


def test_other_files_are_refused(tmp_path):
    path = written(statistics_of(1), tmp_path / "s")
    whole = path.read_bytes()
    for data in (b"", whole[:-1], b"GIF89a", save({"choice_counts": torch.zeros(1)})):
        path.write_bytes(data)
        with pytest.raises(Corrupt):
            read_statistics(path)
    path.write_bytes(whole)
    _edit(path, lambda h, t: h.update(format=2))
    with pytest.raises(PreconditionFailed) as raised:
        read_statistics(path)
    assert raised.value.reason == "SCHEMA_TOO_NEW"
