"""The router of a pool has its parent's heads, and tables and confidences of its own."""

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from calibrator_service.calibration import pipeline
from calibrator_service.calibration.pipeline import CalibrationResult, calibrate
from calibrator_service.calibration.spec import CalibrationSpec, ParentRouter, ServedTraffic
from calibrator_service.calibration.statistics import Parent, read_statistics
from shared.errors import RouterMismatch
from shared.ladder.artefact import pack_ladder, unpack_ladder
from shared.ladder.blob_names import HEADS_BLOB, LADDER_BLOB, STATISTICS_BLOB
from shared.model.loaded import LoadedModel
from tests.random_ladder import random_ladder


def traffic(folder: Path, seed: int, loaded: LoadedModel) -> Path:
    rng = random.Random(seed)
    path = folder / f"{seed}.jsonl"
    lines = (
        {name: rng.choices(range(3, loaded.vocabulary_size), k=24) for name in ("prompt", "answer")} for _ in range(60)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def of_pool(path: Path) -> CalibrationSpec:
    return CalibrationSpec(source=ServedTraffic("legal", str(path)), max_tokens=100_000, exit_depths=(0,))


def parent_of(folder: Path, result: CalibrationResult, loaded: LoadedModel) -> Parent:
    """As a job has it that finds its files."""
    _, blobs = result.pack()
    (folder / "heads").write_bytes(blobs.get(HEADS_BLOB, blobs[LADDER_BLOB]))
    (folder / "statistics").write_bytes(blobs[STATISTICS_BLOB])
    router = ParentRouter(version=1, manifest_digest="sha256:1")
    return Parent.with_heads(folder / "statistics", folder / "heads", router, loaded)


@pytest.mark.full
def test_a_pool_whose_own_head_is_better_gets_it(counting, tmp_path, monkeypatch):
    first = calibrate(counting, of_pool(traffic(tmp_path, 1, counting)))
    spec = of_pool(traffic(tmp_path, 2, counting))
    parent = parent_of(tmp_path, first, counting)
    monkeypatch.setattr(pipeline, "LEAST_GAIN", 0.0)
    own = calibrate(counting, spec, parent=parent)
    assert HEADS_BLOB not in own.pack()[1]
    assert own.statistics.moments.keys() == {0}
    assert not torch.equal(own.ladder.exits[0].head.fuse, parent.heads.by_depth[0].fuse)
    # A later one goes on from that head.
    monkeypatch.setattr(pipeline, "LEAST_GAIN", 1e9)
    child = calibrate(counting, of_pool(traffic(tmp_path, 3, counting)), parent=parent_of(tmp_path, own, counting))
    assert child.heads_blob == own.pack()[1][LADDER_BLOB]
    assert child.statistics.moments == {}


def test_heads_are_compared_by_tokens_a_pass():
    """Of 100 tokens 60 are right by the tables; of the others the better head knows a quarter."""
    found = {
        depth: {"positions": 100, "positions_beside_tables": 40, "agreement_1_beside_tables": share}
        for depth, share in ((0, 0.25), (3, 0.1))
    }
    assert pipeline.tokens_per_pass(found) == pytest.approx(1 / 0.3)
    found[3]["positions_beside_tables"] = 0
    assert pipeline.tokens_per_pass(found) == 1000.0  # a text that is repeated has no pass
    found.clear()
    assert pipeline.tokens_per_pass(found) == 1.0


@pytest.mark.full
def test_generations_of_a_pool_have_the_heads_of_the_first(counting, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "LEAST_GAIN", 1e9)
    first = calibrate(
        counting,
        replace(of_pool(traffic(tmp_path, 1, counting)), source=ServedTraffic("default", str(tmp_path / "1.jsonl"))),
    )
    generations = [first]
    for seed in (2, 3):
        spec = of_pool(traffic(tmp_path, seed, counting))
        generations.append(calibrate(counting, spec, parent=parent_of(tmp_path, generations[-1], counting)))
    whole = first.pack()[1]
    for before, result in pairwise(generations):
        manifest, blobs = result.pack()
        assert blobs[HEADS_BLOB] == whole[LADDER_BLOB]
        (mine,), (firsts,) = result.ladder.exits, first.ladder.exits
        assert all(map(torch.equal, mine.head.parameters(), firsts.head.parameters()))
        assert not torch.equal(mine.confidence.hidden.weight, firsts.confidence.hidden.weight)
        assert manifest["proposers"][-1]["figures"]["positions"] > 0
        # Its sums have no states, and its table has both texts.
        statistics = result.statistics
        assert statistics.moments == {}
        assert len(blobs[STATISTICS_BLOB]) < len(whole[STATISTICS_BLOB])
        assert statistics.num_tokens > before.statistics.num_tokens
        assert statistics.generation == before.statistics.generation + 1
        again = unpack_ladder(manifest, blobs)
        assert torch.equal(again.exits[0].head.fuse, firsts.head.fuse)
        (tmp_path / "read").write_bytes(blobs[STATISTICS_BLOB])
        assert read_statistics(tmp_path / "read").num_tokens == statistics.num_tokens


def test_a_router_without_statistics_is_gone_on_from_by_its_heads(counting, tmp_path):
    ladder = random_ladder(counting, 0, (0,))
    _, blobs = pack_ladder(ladder, {})
    (tmp_path / "heads").write_bytes(blobs[LADDER_BLOB])
    parent = Parent.with_heads(None, tmp_path / "heads", ParentRouter(version=1), counting)
    result = calibrate(counting, of_pool(traffic(tmp_path, 1, counting)), parent=parent)
    assert result.heads_blob == blobs[LADDER_BLOB]
    assert result.statistics.generation == 1


def test_heads_of_another_model_are_refused(counting, tmp_path):
    ladder = random_ladder(counting, 0, (0,))
    wide = replace(ladder, draft_vocabulary=torch.tensor([counting.vocabulary_size]))
    (tmp_path / "heads").write_bytes(pack_ladder(wide, {})[1][LADDER_BLOB])
    with pytest.raises(RouterMismatch):
        Parent.with_heads(None, tmp_path / "heads", ParentRouter(version=1), counting)
