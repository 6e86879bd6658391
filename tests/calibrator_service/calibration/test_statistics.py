"""Statistics of two calibrations add to those of one on everything, and nothing but what was written is read back."""

import json
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from calibrator_service.calibration import statistics as module
from calibrator_service.calibration.pipeline import CalibrationResult, calibrate
from calibrator_service.calibration.spec import AnswerFile, CalibrationSpec, ParentRouter, Progress
from calibrator_service.calibration.states.moments import Moments, MomentsLayout
from calibrator_service.calibration.states.ngram_builder import NgramTableBuilder
from calibrator_service.calibration.statistics import Parent, Statistics, read_statistics, tokenizer_digest
from calibrator_service.calibration.text import splits
from shared.errors import Cancelled, Corrupt, InvalidInput, PreconditionFailed, RouterMismatch
from shared.ladder.blob_names import STATISTICS_BLOB
from shared.ladder.folder import read_ladder, read_router_folder
from shared.model.loaded import LoadedModel
from tests.reasons import raises

LAYOUT = MomentsLayout(hidden_size=4, depth=0, kept_depths=(0, 2))


def statistics_of(seed: int, layout: MomentsLayout = LAYOUT) -> Statistics:
    generator = torch.Generator().manual_seed(seed)
    moments = Moments(layout)
    states = torch.randn(50, layout.width, generator=generator)
    moments._add(states, torch.randn(50, 2 * layout.hidden_size, generator=generator))
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
    with raises(PreconditionFailed, "LAYOUT_MISMATCH"):
        statistics_of(2).plus(parent, 1.0)
    with raises(PreconditionFailed, "LAYOUT_MISMATCH"):
        parent.check(counting, {0: LAYOUT})


def test_another_model_or_tokenizer_is_refused(counting: LoadedModel):
    own = replace(statistics_of(1), fingerprint=counting.fingerprint, tokenizer=tokenizer_digest(counting))
    own.check(counting, {0: LAYOUT})
    with raises(RouterMismatch, "ROUTER_MISMATCH"):
        replace(own, fingerprint="sha256:other").check(counting, {0: LAYOUT})
    with raises(RouterMismatch, "TOKENIZER_MISMATCH"):
        replace(own, tokenizer="sha256:other").check(counting, {0: LAYOUT})


def test_counts_above_the_limit_are_not_packed(monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", module.HEADER_BYTES + 100)
    assert statistics_of(1).to_bytes() is None


@pytest.mark.parametrize(
    ("hidden_size", "num_exits", "directions"), [(4096, 1, 5120), (8192, 1, 9362), (8192, 4, 2340)]
)
def test_sums_of_wide_models_are_projected_into_the_limit(hidden_size, num_exits, directions):
    layout = MomentsLayout(hidden_size, 0, (8, 16))
    assert torch.float.itemsize * layout.num_sums > module.MAX_BYTES
    found = layout.num_directions(module.MAX_BYTES / num_exits)
    assert found == directions
    assert num_exits * found * torch.half.itemsize * 7 * hidden_size <= module.MAX_BYTES


@pytest.mark.full
def test_a_child_goes_on_from_projected_sums(first, counting, monkeypatch, tmp_path):
    """Its own sums are whole, those of its parent are told in fewer directions; all else is as without the limit."""
    whole = first.statistics.to_bytes()
    [layout] = [moments.layout for moments in first.statistics.moments.values()]
    room = len(whole) - torch.float.itemsize * layout.num_sums // 2
    monkeypatch.setattr(module, "MAX_BYTES", room)
    monkeypatch.setattr(module, "HEADER_BYTES", 4096)
    told = read_statistics(written(first.statistics, tmp_path / "s"))
    assert (tmp_path / "s").stat().st_size <= room
    second = write_lines(tmp_path / "second.jsonl", 2)
    child = calibrate(counting, spec_of(second), parent=replace(parent_of(first), statistics=told))
    expected = calibrate(counting, spec_of(second), parent=parent_of(first))
    [ours], [theirs] = ([*result.statistics.moments.values()] for result in (child, expected))
    assert ours.count == theirs.count
    assert 0 < (ours.second - theirs.second).norm() < 0.15 * theirs.second.norm()
    assert child.statistics.num_tokens == expected.statistics.num_tokens
    for one, other in zip(child.ladder.exits, expected.ladder.exits, strict=True):
        assert torch.cosine_similarity(one.head.fuse.flatten(), other.head.fuse.flatten(), 0) > 0.9


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
    _edit(path, lambda h, t: h.update(format=3))
    with raises(PreconditionFailed, "SCHEMA_TOO_NEW"):
        read_statistics(path)


# A multiple of the ten sequences of the pattern of splits, so that each line is in the same split whatever comes before
# it.
LINES = 20


def write_lines(path: Path, *seeds: int) -> Path:
    lines = []
    for seed in seeds:
        draw = random.Random(seed)
        for _ in range(LINES):
            prompt, answer = ([draw.randrange(5, 29) for _ in range(size)] for size in (6, 24))
            lines.append(json.dumps({"prompt": prompt, "answer": answer}))
    path.write_text("\n".join(lines))
    return path


def spec_of(path: Path) -> CalibrationSpec:
    spec = CalibrationSpec(source=AnswerFile(str(path)), max_tokens=5000, exit_depths=(1,))
    return replace(spec, confidence_width=8)


@pytest.fixture(scope="module", autouse=True)
def one_pattern_of_splits() -> Iterator[None]:
    """Texts that are learned one after the other are split as they are together: small texts have no pattern of their
    own here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splits, "NUM_EARLY", 0)
        yield


@pytest.fixture(scope="module")
def first(counting: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> CalibrationResult:
    path = write_lines(tmp_path_factory.mktemp("first") / "answers.jsonl", 1)
    return calibrate(counting, spec_of(path))


def parent_of(result: CalibrationResult, share: float = 1.0) -> Parent:
    assert result.statistics is not None
    return Parent(ParentRouter(version=1, manifest_digest="sha256:1", share=share), result.statistics)


def assert_same_sums(one: Statistics | None, two: Statistics | None) -> None:
    assert one.num_tokens == two.num_tokens
    assert torch.equal(one.choice_counts, two.choice_counts)
    assert torch.equal(one.learned, two.learned)
    counts, others = one.ngrams.to_tensors(), two.ngrams.to_tensors()
    assert all(torch.equal(counts[name], others[name]) for name in counts)
    for depth, moments in one.moments.items():
        other = two.moments[depth]
        assert moments.count == other.count
        torch.testing.assert_close(moments.second, other.second, rtol=1e-3, atol=0.05)
        torch.testing.assert_close(moments.targets, other.targets, rtol=1e-3, atol=0.05)


@pytest.mark.full
def test_the_sums_are_those_of_everything_at_once(first, counting, tmp_path):
    second = write_lines(tmp_path / "second.jsonl", 2)
    child = calibrate(counting, spec_of(second), parent=parent_of(first))
    both = calibrate(counting, spec_of(write_lines(tmp_path / "both.jsonl", 1, 2)))
    assert_same_sums(child.statistics, both.statistics)
    assert first.statistics.num_tokens < child.statistics.num_tokens
    for one, other in zip(child.ladder.exits, both.ladder.exits, strict=True):
        torch.testing.assert_close(one.head.fuse, other.head.fuse, rtol=0.02, atol=0.02)
    assert child.report["spec"]["parent"]["manifest_digest"] == "sha256:1"
    third = write_lines(tmp_path / "third.jsonl", 3)
    grandchild = calibrate(counting, spec_of(third), parent=parent_of(child))
    all_three = calibrate(counting, spec_of(write_lines(tmp_path / "all.jsonl", 1, 2, 3)))
    assert_same_sums(grandchild.statistics, all_three.statistics)


@pytest.mark.full
def test_text_that_the_parent_knows_is_not_counted_again(first, counting, tmp_path):
    """A log that has grown: only its new lines are learned from, and no known prompt is measured."""
    grown = write_lines(tmp_path / "grown.jsonl", 1, 2)
    child = calibrate(counting, spec_of(grown), parent=parent_of(first))
    new = calibrate(counting, spec_of(write_lines(tmp_path / "new.jsonl", 2)))
    own = child.statistics.num_tokens - first.statistics.num_tokens
    # The lines of the parent's other splits are new text here.
    assert new.statistics.num_tokens <= own < new.statistics.num_tokens * 1.5
    with raises(InvalidInput, "TOO_LITTLE_TEXT"):
        calibrate(counting, spec_of(_heads_only(tmp_path, first)), parent=parent_of(first))


def _heads_only(tmp_path: Path, first: CalibrationResult) -> Path:
    lines = write_lines(tmp_path / "again.jsonl", 1).read_text().split("\n")
    path = tmp_path / "heads.jsonl"
    path.write_text("\n".join(line for n, line in enumerate(lines) if n % 10 not in (1, 4)))
    return path


@pytest.mark.full
@pytest.mark.parametrize("phase", ["collecting", "training_confidence", "evaluating"])
def test_a_run_that_is_killed_and_resumed_adds_its_parent_once(first, counting, tmp_path, phase):
    spec = spec_of(write_lines(tmp_path / "second.jsonl", 2))
    whole = calibrate(counting, spec, parent=parent_of(first))
    killed = False

    def kill(progress: Progress) -> None:
        nonlocal killed
        if progress.phase == phase and not killed:
            killed = True
            raise Cancelled("killed")

    def run() -> CalibrationResult:
        return calibrate(counting, spec, parent=parent_of(first), work_dir=tmp_path / "work", progress=kill)

    with pytest.raises(Cancelled):
        run()
    again = run()
    assert_same_sums(again.statistics, whole.statistics)
    assert_same_sums(run().statistics, whole.statistics)


@pytest.mark.full
def test_a_share_weighs_the_parents_tokens(first, counting, tmp_path):
    spec = spec_of(write_lines(tmp_path / "second.jsonl", 2))
    half = calibrate(counting, spec, parent=parent_of(first, share=0.5)).statistics
    alone = calibrate(counting, spec).statistics
    assert half.num_tokens == alone.num_tokens + 0.5 * first.statistics.num_tokens


def test_what_does_not_fit_is_refused_before_any_work(first, counting, tmp_path):
    """There is no text, which would be the first thing that is read."""
    spec = spec_of(tmp_path / "not there.jsonl")
    parent = parent_of(first)
    of_model = replace(parent, statistics=replace(parent.statistics, fingerprint="sha256:other"))
    of_tokens = replace(parent, statistics=replace(parent.statistics, tokenizer="sha256:other"))
    cases = [
        (spec, of_model, RouterMismatch, "ROUTER_MISMATCH"),
        (spec, of_tokens, RouterMismatch, "TOKENIZER_MISMATCH"),
        (replace(spec, exit_depths=(0,)), parent, PreconditionFailed, "LAYOUT_MISMATCH"),
        (replace(spec, parent=ParentRouter(9)), parent, InvalidInput, "BAD_SPEC"),
        (replace(spec, parent=ParentRouter(9)), None, InvalidInput, "INVALID_INPUT"),
    ]
    for asked, given, kind, reason in cases:
        with raises(kind, reason):
            calibrate(counting, asked, parent=given)


def test_a_child_does_not_write_its_ancestors_text(first):
    seeds = {0}
    parent = parent_of(first)
    assert parent.statistics is not None
    for generation in range(5):
        older = replace(parent, statistics=replace(parent.statistics, generation=generation))
        seeds |= {older.spec_of_child(CalibrationSpec()).seed}
    assert len(seeds) == 6


def test_statistics_are_saved_beside_the_ladder(first, counting, tmp_path):
    first.save(tmp_path / "router")
    manifest, blobs = read_router_folder(tmp_path / "router", complete=True)
    assert manifest["calibration"]["statistics"]["num_tokens"] == first.statistics.num_tokens
    parent = Parent.read(tmp_path / "router" / STATISTICS_BLOB, ParentRouter())
    assert parent.statistics.to_bytes() == blobs[STATISTICS_BLOB]
    (tmp_path / "router" / STATISTICS_BLOB).unlink()
    assert read_ladder(tmp_path / "router").proposer_names == first.ladder.proposer_names
