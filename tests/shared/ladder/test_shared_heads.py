"""Routers that have another router's heads: packed without them, and in memory once."""

import copy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load, save

from shared.errors import Corrupt
from shared.ladder.artefact import pack_ladder, round_weights, unpack_heads, unpack_ladder
from shared.ladder.blob_names import HEADS_BLOB, LADDER_BLOB
from shared.ladder.folder import read_ladder, read_router_folder, write_router_folder
from shared.model.loaded import LoadedModel, wrap_model
from tests.random_ladder import random_confidence, random_ladder
from tests.worker import build_model


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(build_model())


def family(loaded: LoadedModel):
    """A router's (manifest, blobs), and those of one that has its heads."""
    first = random_ladder(loaded, 0, (0, 2))
    for layer_exit in first.exits:
        round_weights(layer_exit.head)
        round_weights(layer_exit.confidence)
    own = [random_confidence(loaded, 7 + one.depth) for one in first.exits]
    for confidence in own:
        round_weights(confidence)
    exits = tuple(replace(one, confidence=mine) for one, mine in zip(first.exits, own, strict=True))
    whole = pack_ladder(first, {})
    return whole, pack_ladder(replace(first, exits=exits), {}, whole[1][LADDER_BLOB])


def test_heads_are_packed_once_and_unpacked_once(loaded):
    (manifest, blobs), (of_child, child) = family(loaded)
    assert child[HEADS_BLOB] == blobs[LADDER_BLOB]
    assert len(child[LADDER_BLOB]) < len(blobs[LADDER_BLOB]) / 5
    first = unpack_ladder(manifest, blobs)
    alone = unpack_ladder(of_child, child)
    beside = unpack_ladder(of_child, {LADDER_BLOB: child[LADDER_BLOB]}, first.heads)
    # The parent comes after its child, too.
    late = unpack_ladder(manifest, blobs, alone.heads)
    for one, other in ((beside, first), (late, alone)):
        assert one.draft_vocabulary is other.draft_vocabulary
        assert all(a.head is b.head for a, b in zip(one.exits, other.exits, strict=True))
    for mine, parents, again in zip(alone.exits, first.exits, beside.exits, strict=True):
        assert mine.head is not parents.head
        assert torch.equal(mine.head.fuse, parents.head.fuse)
        assert torch.equal(mine.confidence.hidden.weight, again.confidence.hidden.weight)
        assert not torch.equal(mine.confidence.hidden.weight, parents.confidence.hidden.weight)
    assert unpack_heads(blobs[LADDER_BLOB]).by_depth.keys() == {0, 2}


def test_a_child_may_leave_a_head_out_and_an_own_head_must_be_used(loaded):
    (manifest, blobs), (of_child, child) = family(loaded)
    tensors = load(child[LADDER_BLOB])
    left = {name: tensor for name, tensor in tensors.items() if not name.startswith("depth-2")}
    of_child["proposers"] = [one for one in of_child["proposers"] if one["name"] != "depth-2"]
    found = unpack_ladder(of_child, {**child, LADDER_BLOB: save(left)})
    assert [layer_exit.depth for layer_exit in found.exits] == [0]
    whole = {name: tensor for name, tensor in load(blobs[LADDER_BLOB]).items() if "depth-2.conf" not in name}
    manifest["proposers"] = of_child["proposers"]
    with pytest.raises(Corrupt, match="belong to no proposer"):
        unpack_ladder(manifest, {LADDER_BLOB: save(whole)})


def renamed(manifest, name):
    return {**manifest, "heads": name}


def other_sizes(manifest, **sizes):
    changed = copy.deepcopy(manifest)
    changed["proposers"][0] |= sizes
    return changed


def test_what_does_not_fit_together_is_refused(loaded):
    (manifest, blobs), (of_child, child) = family(loaded)
    heads = unpack_heads(blobs[LADDER_BLOB])
    small = random_ladder(loaded, 1, (0, 2))
    other = pack_ladder(replace(small, draft_vocabulary=torch.arange(5)), {})[1][LADDER_BLOB]
    only = {LADDER_BLOB: child[LADDER_BLOB]}
    cases = (
        (of_child, only, None),
        (manifest, child, None),
        (renamed(of_child, "../heads"), child, None),
        (renamed(of_child, 7), child, None),
        (of_child, {**child, HEADS_BLOB: b"no safetensors"}, None),
        (of_child, {**child, HEADS_BLOB: other}, None),
        (of_child, only, unpack_heads(other)),
        (other_sizes(of_child, mlp_width=64), only, heads),
        (of_child, {HEADS_BLOB: child[HEADS_BLOB]}, heads),
        # Heads of its own beside those that it names.
        (of_child, {**child, LADDER_BLOB: blobs[LADDER_BLOB]}, None),
        (of_child, {LADDER_BLOB: blobs[LADDER_BLOB]}, heads),
    )
    for fields, files, known in cases:
        with pytest.raises(Corrupt):
            unpack_ladder(fields, files, known)
    tensors = load(blobs[LADDER_BLOB])
    tensors["depth-0.head.fuse"][0, 0] = torch.inf
    with pytest.raises(Corrupt, match="not finite"):
        unpack_heads(save(tensors))


def test_a_folder_has_both_files(loaded, tmp_path):
    _, (of_child, child) = family(loaded)
    write_router_folder(tmp_path, of_child, child)
    assert len(read_ladder(tmp_path).exits) == 2
    assert read_router_folder(tmp_path)[1].keys() == {LADDER_BLOB, HEADS_BLOB}
    (tmp_path / HEADS_BLOB).unlink()
    with pytest.raises(Corrupt):
        read_ladder(tmp_path)
