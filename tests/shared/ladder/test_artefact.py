"""A packed ladder unpacks to an equal ladder; damaged ones are refused."""

import copy
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from calibrator_service.calibration.states.ngram_builder import NgramTableBuilder
from shared.errors import Corrupt, PreconditionFailed
from shared.ladder.artefact import BLOB, SCHEMA_VERSION, pack_ladder, round_weights, unpack_ladder
from shared.ladder.confidence_head import ConfidenceHead
from shared.ladder.exit_head import ExitHead
from shared.ladder.exits import LayerExit
from shared.ladder.joint_weights import JointWeights
from shared.ladder.ladder import Ladder, ModelIdentity
from shared.ladder.table_confidence import SIZES, TableConfidence

WEIGHTS = JointWeights(exit_differs=(-2.5, 1 / 3, 0.1))
MODEL = ModelIdentity("tiny", "sha256:" + "0" * 64, "LlamaForCausalLM", 4, 16, 100)


def ladder() -> Ladder:
    builder = NgramTableBuilder()
    row = np.random.default_rng(0).integers(0, 100, 300)
    builder.add(row[:-1], row[1:])
    confidence = TableConfidence(0.25, [[0.5] * size for size in SIZES])
    exits = []
    for depth in (0, 2):
        torch.manual_seed(depth)
        head, confidence_head = ExitHead(16, 24), ConfidenceHead(16, 8)
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter)
        for module in (head, confidence_head):
            round_weights(module)
        exits.append(LayerExit(depth, head, confidence_head))
    return Ladder(
        MODEL, confidence, builder.build(1 << 20), confidence, tuple(exits), torch.tensor([1, 5, 99]), WEIGHTS
    )


def packed() -> tuple[dict[str, Any], dict[str, bytes]]:
    report = {"proposers": {"depth-2": {"agreement": 0.5}}, "tokens": {"total": 7}}
    return pack_ladder(ladder(), report)


def test_round_trip() -> None:
    original = ladder()
    manifest, blobs = pack_ladder(original, {})
    unpacked = unpack_ladder(json.loads(json.dumps(manifest)), blobs)
    assert unpacked.model == original.model
    assert unpacked.proposer_names == original.proposer_names
    assert unpacked.draft_vocabulary is not None
    assert unpacked.draft_vocabulary.tolist() == [1, 5, 99]
    inputs = torch.randn(3, 16), torch.randn(16)
    for before, after in zip(original.exits, unpacked.exits, strict=True):
        adapted = before.head(*inputs)
        assert torch.equal(after.head(*inputs), adapted)
        scalars = torch.randn(3)
        assert torch.equal(after.confidence(adapted, scalars), before.confidence(adapted, scalars))
    assert unpacked.lookup_confidence is not None
    assert original.lookup_confidence is not None
    assert unpacked.lookup_confidence.to_json() == original.lookup_confidence.to_json()
    assert unpacked.joint_weights == WEIGHTS == original.joint_weights
    assert pack_ladder(unpacked, {}) == (manifest, blobs)


def test_joint_weights_of_more_cases_are_read() -> None:
    manifest, blobs = packed()
    manifest["joint_weights"] |= {"agree": [1, 0.5, -0.25], "a later version's": "case"}
    assert unpack_ladder(manifest, blobs).joint_weights == replace(WEIGHTS, agree=(1.0, 0.5, -0.25))


def test_figures_go_to_their_proposers() -> None:
    manifest, _ = packed()
    assert [proposer["name"] for proposer in manifest["proposers"]] == [
        "prompt-lookup",
        "ngram-table",
        "depth-0",
        "depth-2",
    ]
    assert manifest["proposers"][3]["figures"] == {"agreement": 0.5}
    assert manifest["calibration"] == {"tokens": {"total": 7}}


@pytest.mark.parametrize(("model_id", "published"), [("/models/tiny", "tiny"), ("a/tiny", "a/tiny")])
def test_a_path_is_not_published(model_id: str, published: str) -> None:
    named = replace(ladder(), model=replace(MODEL, model_id=model_id))
    assert pack_ladder(named, {})[0]["model"]["id"] == published


def test_a_ladder_without_exits() -> None:
    original = Ladder(MODEL, ladder().lookup_confidence)
    manifest, blobs = pack_ladder(original, {})
    unpacked = unpack_ladder(manifest, blobs)
    assert unpacked.proposer_names == ("prompt-lookup",)
    assert unpacked.draft_vocabulary is None


@pytest.mark.parametrize(
    ("schema_version", "reason", "way"),
    [
        (SCHEMA_VERSION + 1, "SCHEMA_TOO_NEW", f"reads format {SCHEMA_VERSION}"),
        (SCHEMA_VERSION - 1, "SCHEMA_TOO_OLD", "calibrate the model again"),
        (1, "SCHEMA_TOO_OLD", "calibrate the model again"),
    ],
)
def test_another_format_is_refused_with_what_to_do(schema_version: int, reason: str, way: str) -> None:
    manifest, blobs = packed()
    with pytest.raises(PreconditionFailed, match=way) as caught:
        unpack_ladder({**manifest, "schema_version": schema_version}, blobs)
    assert caught.value.reason == reason


def _set(path: str, value: Any) -> Any:
    def damage(manifest: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        target: Any = manifest
        for key in parents:
            target = target[int(key) if key.isdigit() else key]
        target[last] = value

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        _set("schema_version", "1"),
        _set("model", None),
        _set("model.num_layers", 2),  # the exit at depth 2 would skip nothing
        _set("model.hidden_size", 32),
        _set("model.hidden_size", 10**9),
        _set("model.vocabulary_size", 50),
        _set("model.fingerprint", 5),
        _set("proposers", {}),
        _set("proposers.2.mlp_width", 10**9),
        _set("proposers.2.mlp_width", 23),
        _set("proposers.2.head_width", 12),
        _set("proposers.2.depth", 1),
        _set("proposers.2.depth", True),
        _set("proposers.2.confidence_width", 9),
        _set("proposers.3.name", "depth-0"),
        _set("proposers.0.confidence", {"bias": 0.0, "weights": []}),
        _set("draft_vocabulary", 4),
        _set("joint_weights", [1, 2, 3]),
        _set("joint_weights", None),
        _set("joint_weights.agree", None),
        lambda manifest: manifest["joint_weights"].pop("agree"),
        lambda manifest: manifest.pop("joint_weights"),
        _set("joint_weights.agree", [0.5, 0.5]),
        _set("joint_weights.agree", [0.5, 0.5, "0.5"]),
        _set("joint_weights.agree", [0.5, 0.5, True]),
        _set("joint_weights.agree", [0.5, 0.5, 20.5]),
        _set("joint_weights.agree", [0.5, 0.5, 10**400]),
        _set("joint_weights.agree", [0.5, 0.5, math.nan]),
        _set("joint_weights.agree", [0.5, 0.5, -math.inf]),
        lambda manifest: manifest["proposers"].pop(1),
        lambda manifest: manifest["proposers"].pop(3),
        lambda manifest: manifest["proposers"].reverse(),
        lambda manifest: manifest.pop("proposers"),
    ],
)
def test_a_damaged_manifest_is_refused(damage: Any) -> None:
    manifest, blobs = packed()
    damaged = copy.deepcopy(manifest)
    damage(damaged)
    with pytest.raises(Corrupt):
        unpack_ladder(damaged, blobs)


def test_damaged_tensors_are_refused() -> None:
    manifest, blobs = packed()
    tensors = load(blobs[BLOB])
    gain = tensors["depth-0.head.gain"]
    broken = gain.clone()
    broken[0] = float("nan")
    cases = [
        {"depth-0.head.gain": broken},
        {"depth-0.head.gain": gain[:-1].clone()},
        {"depth-0.head.gain": gain.float()},
        {"draft_vocabulary": torch.tensor([1, 1, 2], dtype=torch.int32)},
        {"draft_vocabulary": torch.tensor([1, 2, 100], dtype=torch.int32)},
        {"draft_vocabulary": torch.tensor([1, 2, 3])},
        {"unheard_of": gain.clone()},
    ]
    for case in cases:
        with pytest.raises(Corrupt):
            unpack_ladder(manifest, {BLOB: save({**tensors, **case})})
    for missing in ("depth-2.confidence.output.bias", "ngram-table.3.keys", "draft_vocabulary"):
        with pytest.raises(Corrupt):
            unpack_ladder(manifest, {BLOB: save({k: v for k, v in tensors.items() if k != missing})})


def test_damaged_blobs_are_refused() -> None:
    manifest, blobs = packed()
    for data in (b"", b"x" * 100, blobs[BLOB][:-5], b"\xff" * 8 + blobs[BLOB][8:]):
        with pytest.raises(Corrupt):
            unpack_ladder(manifest, {BLOB: data})
    with pytest.raises(Corrupt):
        unpack_ladder(manifest, {})
    with pytest.raises(Corrupt):
        unpack_ladder(manifest, {**blobs, "more": b""})
