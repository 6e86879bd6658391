"""The file of a calibration's sums: a killed run goes on from it, and counts nothing twice."""

from pathlib import Path

import pytest
import torch

from calibrator_service.calibration.states import moments as moments_module
from calibrator_service.calibration.states.collect import Collector
from calibrator_service.calibration.states.moments import MomentsLayout, Sums
from calibrator_service.calibration.text.shards import TokenSequence
from shared.errors import Corrupt
from shared.model.contiguous_runner import ContiguousRunner
from tests.calibrator_service.calibration.chunks import LAYOUT, SIZE, random_chunk

CHUNKS = [random_chunk(seed=seed) for seed in range(4)]


def new_sums(path: Path | None = None) -> Sums:
    return Sums({0: LAYOUT}, torch.Tensor.float, torch.device("cpu"), path)


def added(sums: Sums, start: int, end: int) -> Sums:
    for chunk in CHUNKS[start:end]:
        sums.add(chunk)
    return sums


def assert_equal(found: Sums, expected: Sums) -> None:
    assert found.num_chunks == expected.num_chunks
    for depth, own in expected.moments.items():
        assert found.moments[depth].count == own.count > 0
        torch.testing.assert_close(found.moments[depth].second, own.second, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(found.moments[depth].targets, own.targets, rtol=1e-5, atol=1e-4)


def test_a_resumed_run_has_the_sums_of_one_that_was_not_killed(tmp_path):
    path = tmp_path / "sums.safetensors"
    added(new_sums(path), 0, 2).save()
    resumed = new_sums(path)
    assert resumed.num_chunks == 2
    assert_equal(added(resumed, 2, 4), added(new_sums(), 0, 4))


def test_sums_are_saved_now_and_then(tmp_path, monkeypatch):
    path = tmp_path / "sums.safetensors"
    added(new_sums(path), 0, 1)
    assert not path.exists()
    monkeypatch.setattr(moments_module, "SAVE_INTERVAL_S", 0.0)
    added(new_sums(path), 0, 3)
    assert_equal(new_sums(path), added(new_sums(), 0, 3))


def test_a_collector_that_begins_again_counts_no_chunk_twice(counting, tmp_path):
    """Also those that were read after the file was last saved."""
    rows = torch.randint(5, 29, (9, 20), generator=torch.Generator().manual_seed(0)).tolist()
    layout = MomentsLayout(counting.hidden_size, 0, (1, 2))

    def collected(folder: Path, killed_after: int = len(rows), saved_after: int = 0) -> Sums:
        sums = Sums({0: layout}, torch.Tensor.float, torch.device("cpu"), folder / "sums")
        mine = Collector(
            ContiguousRunner(counting),
            (0, 1, 2),
            folder,
            max_state_bytes=1 << 20,
            sums=sums,
            stored=("confidence",),
            chunk_positions=30,
        )
        for number, row in enumerate(rows[:killed_after], 1):
            mine.add("heads", TokenSequence(tuple(row), 4))
            if number == saved_after:
                sums.save()
        if killed_after == len(rows):
            mine.finish("heads")
        return sums

    whole = collected(tmp_path / "whole")
    assert whole.num_chunks > 3
    collected(tmp_path / "killed", killed_after=6, saved_after=4)
    assert_equal(collected(tmp_path / "killed"), whole)


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "sums.safetensors"
    added(new_sums(path), 0, 2).save()
    whole = path.read_bytes()
    for damaged in (b"", b"text", whole[:-1], whole[: len(whole) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(Corrupt):
            new_sums(path)
    path.write_bytes(whole)
    other = MomentsLayout(2 * SIZE, 0, (2, 4))
    with pytest.raises(Corrupt):
        Sums({0: other}, torch.Tensor.float, torch.device("cpu"), path)
    with pytest.raises(Corrupt):
        Sums({0: LAYOUT, 3: LAYOUT}, torch.Tensor.float, torch.device("cpu"), path)
