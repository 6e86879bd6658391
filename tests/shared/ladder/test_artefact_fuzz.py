"""Fuzzing the loader of published routers: on changed bytes it loads, or raises only the errors that it documents."""

import copy
import io
import json
import pickle
import random
import struct
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load, save

from shared.errors import Corrupt, NotFound, PreconditionFailed
from shared.ladder.artefact import BLOB, unpack_ladder
from shared.ladder.folder import MANIFEST, read_ladder, write_router_folder
from tests.fuzzing import cases, mutated
from tests.shared.ladder.test_artefact import packed

pytestmark = pytest.mark.full

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 10**9, 2**63, 10**400, -(10**400), 0.5, 1e308, -0.0),
    *("", "depth-2", "prompt-lookup", "x" * 5000, "\x00", [], {}, [[]], [0] * 300, {"a": 1}),
    *(float("nan"), float("inf")),
)
DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "U16", "U32", "U64", "BOOL")
RARE_DTYPES = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "C64", "Q9")


class _RunsCode:
    """Loading a pickle of this runs code, which is recorded in `fired`."""

    fired: ClassVar[list[str]] = []

    def __reduce__(self) -> Any:
        return _RunsCode.fired.append, ("loaded",)


def _torch_file(**options: Any) -> bytes:
    file = io.BytesIO()
    torch.save({"a": torch.zeros(3), "b": _RunsCode()}, file, **options)
    return file.getvalue()


PICKLES = {
    "torch": _torch_file(),
    "torch-legacy": _torch_file(_use_new_zipfile_serialization=False),
    **{f"protocol-{number}": pickle.dumps([_RunsCode()], number) for number in range(pickle.HIGHEST_PROTOCOL + 1)},
}


@pytest.mark.parametrize("kind", PICKLES)
def test_a_pickle_is_refused_by_its_content_and_never_loaded(kind, tmp_path):
    manifest, _ = packed()
    _RunsCode.fired.clear()
    with pytest.raises(Corrupt) as caught:
        unpack_ladder(manifest, {BLOB: PICKLES[kind]})
    # Protocols 0 and 1 have no mark at their beginning.
    if kind not in ("protocol-0", "protocol-1"):
        assert caught.value.reason == "PICKLE_REFUSED"
    write_router_folder(tmp_path, manifest, {BLOB: PICKLES[kind]})  # the name says safetensors
    with pytest.raises(Corrupt):
        read_ladder(tmp_path)
    assert _RunsCode.fired == []


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of keys and indices to everything inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, inner in items:
        found.append((*path, key))
        if isinstance(inner, dict | list):
            found += _paths(inner, (*path, key))
    return found


def _changed(manifest: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """The manifest with one or two of its values replaced, removed or duplicated."""
    changed = copy.deepcopy(manifest)
    for _ in range(chance.choice((1, 1, 2))):
        *parents, last = chance.choice(_paths(changed) or [("model",)])
        target: Any = changed
        for key in parents:
            target = target[key]
        what = chance.random()
        if what < 0.7:
            target[last] = copy.deepcopy(chance.choice(VALUES))
        elif what < 0.9 or not isinstance(target, list):
            del target[last]
        else:
            target.append(target[last])
    return changed


def _with_changed_header(blob: bytes, chance: random.Random) -> bytes:
    """The blob with one entry of its header changed: dtypes, shapes and offsets may contradict each other."""
    (length,) = struct.unpack("<Q", blob[:8])
    header = json.loads(blob[8 : 8 + length])
    entry = header[chance.choice(sorted(header))]
    what = chance.randrange(4)
    if what == 0:
        entry["dtype"] = chance.choice(DTYPES + RARE_DTYPES)
    elif what == 1:
        entry["shape"] = chance.choice(([], [0], [-1], [2**62, 4], [1] * 100, entry["shape"][::-1]))
    elif what == 2:
        entry["data_offsets"][chance.randrange(2)] = chance.choice((0, 1, len(blob), 2**63, -1))
    else:
        header[chance.choice(("__metadata__", "x", ""))] = chance.choice(VALUES[:20])
    data = json.dumps(header).encode()
    return struct.pack("<Q", len(data)) + data + blob[8 + length :]


def test_the_loader_raises_nothing_but_its_own_errors(tmp_path):
    manifest, blobs = packed()
    blob, text = blobs[BLOB], json.dumps(manifest).encode()
    num_refused = 0
    for seed, chance in cases():
        what = seed % 4
        try:
            if what == 0:
                unpack_ladder(manifest, {BLOB: mutated(blob, chance)})
            elif what == 1:
                unpack_ladder(manifest, {BLOB: _with_changed_header(blob, chance)})
            elif what == 2:
                unpack_ladder(_changed(manifest, chance), blobs)
            else:
                (tmp_path / BLOB).write_bytes(blob)
                (tmp_path / MANIFEST).write_bytes(mutated(text, chance))
                read_ladder(tmp_path)
        except (Corrupt, PreconditionFailed, NotFound):
            num_refused += 1
        except Exception as error:
            pytest.fail(f"{type(error).__name__}: {error} with seed {seed}")
    assert num_refused > 5


def _with_entry(blob: bytes, dtype: str, shape: list[int], num_bytes: int) -> bytes:
    """The blob with "depth-0.head.gain" [16] replaced by `num_bytes` zeros whose header entry gives `dtype` and
    `shape`."""
    name = "depth-0.head.gain"
    others = save({key: value for key, value in load(blob).items() if key != name})
    (length,) = struct.unpack("<Q", others[:8])
    header, data = json.loads(others[8 : 8 + length]), others[8 + length :]
    offsets = [len(data), len(data) + num_bytes]
    header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data + b"\x00" * num_bytes


@pytest.mark.parametrize("dtype", RARE_DTYPES + DTYPES)
def test_every_dtype_but_the_one_shipped_is_refused(dtype):
    manifest, blobs = packed()
    sizes = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4}
    size = sizes.get(dtype, 2 if dtype in ("F16", "BF16", "I16", "U16") else 1)
    made = _with_entry(blobs[BLOB], dtype, [16], 16 * size)
    if dtype == "F16":
        unpack_ladder(manifest, {BLOB: made})
        return
    with pytest.raises(Corrupt):
        unpack_ladder(manifest, {BLOB: made})


@pytest.mark.parametrize("shape", [[16] + [1] * 70, [2**62, 4], [-16], [16, 0]], ids=len)
def test_shapes_that_no_tensor_has_are_refused(shape):
    manifest, blobs = packed()
    with pytest.raises(Corrupt):
        unpack_ladder(manifest, {BLOB: _with_entry(blobs[BLOB], "F16", shape, 32)})


@pytest.mark.parametrize("number", [10**400, -(10**400)])
@pytest.mark.parametrize("place", ["agreement", "bias"])
def test_numbers_too_large_for_a_float_are_refused(number, place):
    manifest, blobs = packed()
    if place == "agreement":
        manifest["proposers"][2]["figures"]["agreement"] = number
    else:
        manifest["proposers"][0]["confidence"]["bias"] = number
    with pytest.raises(Corrupt):
        unpack_ladder(manifest, blobs)
