"""Calibration by two ranks, this process and another, beside one rank's."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed import distributed_c10d

from calibrator_service.calibration import plan
from calibrator_service.calibration.pipeline import CalibrationResult, calibrate
from calibrator_service.calibration.ranks import joined
from calibrator_service.calibration.spec import AnswerFile, CalibrationSpec
from calibrator_service.calibration.statistics import read_statistics
from shared.errors import Unavailable
from shared.ladder.blob_names import STATISTICS_BLOB
from shared.model.loaded import LoadedModel
from tests.calibrator_service.calibration import rank_program
from tests.calibrator_service.calibration.test_pipeline import SPEC, answers_file
from tests.reasons import raises
from tests.servers import free_ports

pytestmark = pytest.mark.timeout(600)

# Training by gradients, of a text that is small enough for a test.
TRAINED = 1000


@pytest.fixture(scope="module")
def cases(base_model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By name: what one rank has made, what each of two has, and their folder."""
    folder = tmp_path_factory.mktemp("ranks")
    sequences = [[5 + (i + n + n * (i // 24)) % 24 for n in range(40)] for i in range(90)]
    specs = {
        "written": SPEC,
        "given": CalibrationSpec(source=answers_file(folder, sequences), exit_depths=(0,), max_tokens=3000),
        "trained": SPEC,
        "differ": SPEC,
        "missing": replace(SPEC, source=AnswerFile(str(folder / "nowhere.jsonl"))),
    }
    asked = [(name, spec, TRAINED if name == "trained" else plan.TRAINING_TOKENS) for name, spec in specs.items()]
    (folder / "asked").write_bytes(pickle.dumps((asked, base_model.model.state_dict())))
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    command = [sys.executable, "-m", rank_program.__name__, str(folder)]
    with subprocess.Popen(command, env={**os.environ, **place, "RANK": "1"}) as other:
        try:
            with patch.dict(os.environ, {**place, "RANK": "0"}):
                rank_program.main(folder)
            assert other.wait(60) == 0
        finally:
            other.kill()
    made: dict[str, Any] = {}
    for name, spec, training in asked[:3]:
        with patch.object(plan, "TRAINING_TOKENS", training):
            made[name] = calibrate(base_model, spec, work_dir=folder / "alone" / name)
    of_ranks = {name: [pickle.loads((folder / f"{name}-{rank}").read_bytes()) for rank in (0, 1)] for name in specs}
    return made, of_ranks, folder


@pytest.mark.full
@pytest.mark.parametrize("name", ["written", "given"])
def test_two_ranks_make_the_router_of_one(cases, name):
    made, of_ranks, _ = cases
    alone: CalibrationResult = made[name]
    (ladder, report, _), heard = of_ranks[name][0]
    assert of_ranks[name][1][0] is None, "the first rank has the result"
    assert report["tokens"] == alone.report["tokens"]
    assert torch.equal(ladder.draft_vocabulary, alone.ladder.draft_vocabulary)
    for table in ("prompt-lookup", "ngram-table"):
        assert report["proposers"][table] == alone.report["proposers"][table]
    for one, other in zip(ladder.exits, alone.ladder.exits, strict=True):
        assert torch.cosine_similarity(one.head.fuse.flatten(), other.head.fuse.flatten(), 0) > 0.999
        assert one.agreement == pytest.approx(other.agreement, abs=0.02)
    assert heard == sorted(heard)
    assert heard[-1] == 1.0


@pytest.mark.full
@pytest.mark.parametrize("name", ["written", "given"])
def test_sums_are_those_of_one_rank(cases, tmp_path, name):
    made, of_ranks, _ = cases
    sides = []
    for number, blobs in enumerate((of_ranks[name][0][0][2], made[name].pack()[1])):
        path = tmp_path / str(number)
        path.write_bytes(blobs[STATISTICS_BLOB])
        sides.append(read_statistics(path))
    ours, theirs = sides
    assert ours.num_tokens == theirs.num_tokens
    assert torch.equal(ours.choice_counts, theirs.choice_counts)
    assert torch.equal(ours.learned, theirs.learned)
    for key, counts in ours.ngrams.to_tensors().items():
        assert torch.equal(counts, theirs.ngrams.to_tensors()[key]), key
    for depth, moments in ours.moments.items():
        assert moments.count == theirs.moments[depth].count
        torch.testing.assert_close(moments.second, theirs.moments[depth].second, rtol=1e-3, atol=0.05)
        torch.testing.assert_close(moments.targets, theirs.moments[depth].targets, rtol=1e-3, atol=0.05)


@pytest.mark.full
def test_heads_that_both_have_trained_are_as_good_as_those_of_one(cases):
    made, of_ranks, _ = cases
    solved, alone = (made[name].report["proposers"] for name in ("written", "trained"))
    together = of_ranks["trained"][0][0][1]["proposers"]
    for name in ("depth-0", "depth-2"):
        assert alone[name]["agreement_1"] != solved[name]["agreement_1"], "training has changed it"
        assert together[name]["agreement_1"] == pytest.approx(alone[name]["agreement_1"], abs=0.05)


@pytest.mark.full
def test_each_rank_keeps_its_own_states(cases):
    _, _, folder = cases
    for name in ("written", "given"):
        files = {
            rank: {path.name.split("-00")[0] for path in (folder / name).glob(f"*/rank-{rank}-of-2/*")}
            for rank in (0, 1)
        }
        assert {"states-confidence", "states-report"} <= files[0]
        assert not {"states-confidence", "states-report"} & files[1]
        assert all("sums.safetensors" in names for names in files.values())
    assert len(list((folder / "written" / "text").iterdir())) > 2


@pytest.mark.full
def test_ranks_of_different_models_refuse(cases):
    _, of_ranks, _ = cases
    assert [result for result, _ in of_ranks["differ"]] == ["RANKS_DIFFER"] * 2


@pytest.mark.full
def test_one_ranks_error_ends_the_others(cases):
    _, of_ranks, _ = cases
    assert [result for result, _ in of_ranks["missing"]] == ["FILE_NOT_FOUND", "RANK_LOST"]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_never_meet(monkeypatch, rank):
    [port] = free_ports(1)
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    # torch numbers a process' groups. One that did not come about keeps its number, so later ones never meet theirs.
    monkeypatch.setattr(distributed_c10d, "_group_count", 0)
    with raises(Unavailable, "RANKS_MISSING", match="the 2 ranks have not met"), joined(1.0):
        pass
