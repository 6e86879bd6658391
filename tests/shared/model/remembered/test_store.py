"""What a start remembers: it gives the same bits, it is not believed if it is damaged or of something else, and it is
never needed."""

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import structlog
import torch
from torch import Tensor

from shared import ops
from shared.engine.drafting import costs
from shared.engine.drafting.costs import RememberingMeter
from shared.engine.engine import Engine
from shared.errors import Exhausted
from shared.model import load
from shared.model.contiguous_runner import ContiguousRunner, GatedModel
from shared.model.load import load_model
from shared.model.loaded import LoadedModel
from shared.model.numerics import Promise
from shared.model.remembered import key, store
from shared.model.remembered.packed import PackedMatrices
from shared.model.remembered.store import StartStore
from shared.model.substitution import apply
from shared.model.substitution import rotary as rotary_files
from shared.model.substitution.layer import FusedLayer
from tests.gguf_files import write_llama
from tests.tiers import tiered
from tests.worker import save_model

MAX_BYTES = 1 << 30


@pytest.fixture(scope="module", autouse=True)
def _digests_of_the_build() -> Iterator[None]:
    """All sources and the library are read once, not in each of a hundred starts."""
    with patch.object(store, "build_of", cache(key.build_of)):
        yield


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "tiny.gguf")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "start-cache"


def _start(model: Path, folder: Path, max_bytes: int = MAX_BYTES) -> LoadedModel:
    """A start of a worker: what it finds out is kept."""
    loaded = load_model(model, store=StartStore(folder, max_bytes))
    with Engine(loaded, cost_meter=RememberingMeter()) as engine:
        engine.warm_up()
        engine.measure_costs()
    loaded.facts.keep()
    return loaded


@torch.no_grad()
def _logits(loaded: LoadedModel) -> Tensor:
    logits: Tensor = loaded.model(input_ids=torch.arange(9)[None]).logits
    return logits


def _entry(folder: Path) -> Path:
    (entry,) = (path for path in folder.iterdir() if path.name != "contents")
    return entry


def _remembers(loaded: LoadedModel) -> bool:
    return bool(loaded.facts.earlier)


def _fail(*_: object, **__: object) -> None:
    raise AssertionError("this is known already")


def _flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("form", tiered(["gguf", "safetensors"], {"gguf"}))
def test_a_later_start_gives_the_same_bits_and_does_nothing_again(
    tmp_path: Path, folder: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_llama(tmp_path / "tiny.gguf") if form == "gguf" else save_model(tmp_path / "folder")
    first = _start(path, folder)
    for owner, name in (
        (ops, "pack_blocks"),
        (ops, "pack_linear"),
        (apply, "_logits_in_one_pass"),
        (apply, "_padded_logits"),
        (costs, "pass_timings"),
        (costs, "verify_estimate"),
    ):
        monkeypatch.setattr(owner, name, _fail)
    second = _start(path, folder)
    assert _remembers(second)
    assert not _remembers(first)
    assert torch.equal(_logits(first), _logits(second))
    assert torch.equal(_logits(second), _logits(load_plain(path, monkeypatch)))
    assert second.fingerprint == first.fingerprint
    assert second.acceleration == first.acceleration


def load_plain(path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    monkeypatch.undo()
    return load_model(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": lambda entry: _flip(entry / "packed", 200),
    "header": lambda entry: _flip(entry / "packed", 3),
    "cut": lambda entry: _cut(entry / "packed"),
    "gone": lambda entry: (entry / "packed").unlink(),
    "facts flipped": lambda entry: _flip(entry / "facts.json", 300),
    "facts cut": lambda entry: _cut(entry / "facts.json"),
    "facts of another kind": lambda entry: (entry / "facts.json").write_bytes(b"[]"),
}


@pytest.mark.parametrize("damage", tiered(DAMAGES, {"flipped", "facts flipped"}))
def test_what_is_damaged_is_made_anew(model: Path, folder: Path, damage: str) -> None:
    expected = _logits(_start(model, folder))
    DAMAGES[damage](_entry(folder))
    anew = _start(model, folder)
    assert not _remembers(anew)
    assert torch.equal(_logits(anew), expected)
    assert _remembers(_start(model, folder))


def test_an_entry_under_a_foreign_name_is_not_believed(tmp_path: Path, model: Path, folder: Path) -> None:
    other = write_llama(tmp_path / "other.gguf", inner=128)
    expected = _logits(_start(other, folder))
    theirs = _entry(folder)
    _start(model, folder)
    (own,) = (path for path in folder.iterdir() if path not in (theirs, folder / "contents"))
    shutil.rmtree(theirs)
    shutil.copytree(own, theirs)
    with structlog.testing.capture_logs() as logs:
        loaded = _start(other, folder)
    assert not _remembers(loaded)
    assert torch.equal(_logits(loaded), expected)
    assert [line["reason"] for line in logs if "damaged" in line["event"]] == ["it belongs to something else"]


@pytest.mark.parametrize("part", tiered(["code", "versions", "processor", "threads", "variables"], {"code"}))
def test_another_build_or_machine_proves_anew(
    model: Path, folder: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _start(model, folder)
    build = key.build_of()
    assert part in build
    monkeypatch.setattr(store, "build_of", lambda: build | {part: "another"})
    assert not _remembers(_start(model, folder))
    monkeypatch.undo()
    assert _remembers(_start(model, folder))


def test_a_change_of_a_source_file_changes_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "a.py").write_text("x = 1")
    (package / "library.so").write_bytes(b"code")
    monkeypatch.setattr(key, "PACKAGE", package)
    monkeypatch.setattr(key, "LIBRARY", package / "library.so")
    before = key.build_of()["code"]
    (package / "a.py").write_text("x = 2")
    after = key.build_of()["code"]
    (package / "library.so").write_bytes(b"cade")
    assert len({before, after, key.build_of()["code"]}) == 3


def test_weights_that_changed_in_place_are_read_again(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key, "_SETTLED_NS", 0)
    first = _start(model, folder)
    before = model.stat()
    other = write_llama(model.with_name("other.gguf"), inner=96)
    _flip(other, other.stat().st_size - 9)
    model.write_bytes(other.read_bytes())
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert model.stat().st_size == before.st_size
    assert model.stat().st_ino == before.st_ino
    second = _start(model, folder)
    assert not _remembers(second)
    assert second.fingerprint != first.fingerprint
    assert not torch.equal(_logits(first), _logits(second))


def test_a_copy_of_the_same_content_is_known_and_read_once(
    tmp_path: Path, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key, "_SETTLED_NS", 0)
    _start(model, folder)
    (tmp_path / "elsewhere").mkdir()
    copied = Path(shutil.copy(model, tmp_path / "elsewhere"))
    assert _remembers(_start(copied, folder))
    monkeypatch.setattr(store, "content_of", _fail)
    assert _remembers(_start(copied, folder))
    assert _remembers(_start(model, folder))


def test_a_file_that_was_just_written_is_read_each_time(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key, "_SETTLED_NS", 1 << 62)
    _start(model, folder)
    assert not (folder / "contents").exists()
    assert _remembers(_start(model, folder))


def test_a_first_start_does_not_wait_for_the_digest_of_its_files(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key, "_SETTLED_NS", 0)
    with monkeypatch.context() as patch:
        patch.setattr(store, "content_of", _fail)
        loaded = load_model(model, store=StartStore(folder, MAX_BYTES))
    expected = _logits(loaded)
    loaded.facts.keep()
    later = load_model(model, store=StartStore(folder, MAX_BYTES))
    assert _remembers(later)
    assert torch.equal(_logits(later), expected)
    assert torch.equal(_logits(loaded), expected)


def test_what_changed_before_its_digest_was_taken_is_not_remembered(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key, "_SETTLED_NS", 0)
    loaded = load_model(model, store=StartStore(folder, MAX_BYTES))
    model.write_bytes(write_llama(model.with_name("other.gguf"), inner=96).read_bytes())
    loaded.facts.keep()
    assert list(folder.rglob("facts.json")) == []


def test_a_folder_that_cannot_be_written_costs_one_line(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_text("a file is in the way")
    monkeypatch.setattr(key, "_SETTLED_NS", 0)
    with structlog.testing.capture_logs() as logs:
        loaded = _start(model, folder)
    assert torch.equal(_logits(loaded), _logits(load_model(model)))
    assert [line for line in logs if line["log_level"] == "warning" and "folder" in line] == [
        {
            "event": "nothing is remembered for the next start: the folder cannot be written",
            "log_level": "warning",
            "folder": str(folder),
            "errno": errno.ENOTDIR,
        }
    ]


def test_a_full_disk_leaves_nothing_behind(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", full)
    loaded = _start(model, folder)
    assert [path for path in folder.rglob("*") if path.is_file()] == []
    monkeypatch.undo()
    assert not _remembers(_start(model, folder))
    assert torch.equal(_logits(loaded), _logits(_start(model, folder)))


def test_matrices_are_written_after_everything_is_measured(model: Path, folder: Path) -> None:
    loaded = load_model(model, store=StartStore(folder, MAX_BYTES))
    with Engine(loaded, cost_meter=RememberingMeter()) as engine:
        engine.warm_up()
    assert [path.name for path in folder.rglob("packed")] == []
    loaded.facts.keep()
    assert sorted(path.name for path in _entry(folder).iterdir()) == ["facts.json", "packed"]


def test_matrices_that_cannot_be_mapped_stay_in_memory_and_are_remembered(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "mremap")

    monkeypatch.setattr(PackedMatrices, "map", refuse)
    with structlog.testing.capture_logs() as logs:
        first = _start(model, folder)
    assert [line["errno"] for line in logs if "stay in memory" in line["event"]] == [errno.ENOMEM]
    second = _start(model, folder)
    assert _remembers(second)
    assert torch.equal(_logits(first), _logits(second))


def test_a_start_that_ends_while_it_writes_is_not_believed(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    loaded = load_model(model, store=StartStore(folder, MAX_BYTES))
    with monkeypatch.context() as patch:
        patch.setattr(store, "write_atomically", killed)
        with pytest.raises(KeyboardInterrupt):
            loaded.facts.keep()
    assert [path.name for path in _entry(folder).iterdir()] == ["packed"]
    assert not _remembers(_start(model, folder))
    assert _remembers(_start(model, folder))


def test_two_workers_at_once_both_start(model: Path, folder: Path) -> None:
    expected, made = _logits(load_model(model)), []
    threads = [threading.Thread(target=lambda: made.append(_start(model, folder))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    later = _start(model, folder)
    assert _remembers(later)
    assert [torch.equal(_logits(loaded), expected) for loaded in (*made, later)] == [True] * 3
    assert list(folder.rglob("*.part")) == []


def test_a_model_that_is_mapped_survives_the_removal_of_its_entry(model: Path, folder: Path) -> None:
    expected = _logits(_start(model, folder))
    loaded = _start(model, folder)
    shutil.rmtree(folder)
    assert torch.equal(_logits(loaded), expected)


def test_the_least_recently_used_entry_gives_way(tmp_path: Path, folder: Path) -> None:
    models = [write_llama(tmp_path / f"{n}.gguf", inner=96 + 32 * n) for n in range(3)]
    _start(models[0], folder)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    limit = int(2.7 * size)
    _start(models[1], folder, limit)
    assert _remembers(_start(models[0], folder, limit))
    _start(models[2], folder, limit)
    assert _remembers(_start(models[0], folder, limit))
    assert not _remembers(_start(models[1], folder, limit))


def test_matrices_larger_than_the_folder_may_be_are_not_written(model: Path, folder: Path) -> None:
    _start(model, folder, 1000)
    assert not list(folder.rglob("packed"))


def test_the_promise_is_tried_again_if_the_bits_are_others(model: Path, folder: Path) -> None:
    _start(model, folder)
    path = _entry(folder) / "facts.json"
    record = json.loads(path.read_bytes())
    (name,) = (name for name in record["facts"] if name.startswith("numerics"))
    known = Promise(**record["facts"][name]["promise"])
    record["facts"][name] = {"bits": "", "promise": {"facts": {}, "is_exact": False, "why_not": ""}}
    record.pop("digest")
    path.write_text(json.dumps(record | {"digest": store._digest(record)}))
    loaded = load_model(model, store=StartStore(folder, MAX_BYTES))
    with structlog.testing.capture_logs() as logs, Engine(loaded) as engine:
        assert engine.promise == known
    assert any("other bits" in line["event"] for line in logs)


@pytest.mark.parametrize("form", ["gguf", "safetensors"])
@pytest.mark.parametrize("dtype", tiered([None, torch.float16], {None}))
def test_a_fingerprint_that_is_found_later_is_the_same(
    tmp_path: Path, folder: Path, form: str, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also once inputs are rounded, and pages of the written file have taken the place of the packed matrices."""
    path = write_llama(tmp_path / "tiny.gguf") if form == "gguf" else save_model(tmp_path / "folder")
    expected = load_model(path, dtype=dtype).fingerprint
    monkeypatch.setattr(load, "is_large", lambda _: True)
    loaded = load_model(path, dtype=dtype, store=StartStore(folder, MAX_BYTES))
    with Engine(loaded):
        loaded.facts.keep()
        assert list(folder.rglob("packed"))
        assert not loaded.identity.is_known
        assert loaded.fingerprint == expected


def test_costs_are_measured_again_when_they_are_old(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _start(model, folder)
    (name,) = (name for name in first.facts.values if name.startswith("costs"))
    monkeypatch.setattr(costs, "REMEMBERED_S", 0.0)
    monkeypatch.setattr(costs, "verify_estimate", _fail)  # until then it begins with the old ones
    second = _start(model, folder)
    assert second.facts.values[name]["measured_s"] > first.facts.values[name]["measured_s"]


SHORT = {"run_ragged": ContiguousRunner, "normed": GatedModel, "fused": FusedLayer, "acquire": rotary_files}


@pytest.mark.parametrize("where", tiered(SHORT, {"run_ragged"}))
def test_memory_that_is_short_at_a_start_is_no_property_of_the_model(model, tmp_path, folder, monkeypatch, where):
    def refuse(*given: object, **named: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory")

    expected = ContiguousRunner(_start(model, tmp_path / "another"))
    with monkeypatch.context() as patch:
        patch.setattr(SHORT[where], where, refuse)
        with pytest.raises(Exhausted) as raised:
            _start_contiguous(model, folder)
    assert raised.value.reason == "OUT_OF_MEMORY"
    runner = _start_contiguous(model, folder)
    assert runner.loaded.facts.known().keys() <= expected.loaded.facts.known().keys()
    assert (runner.supports_ragged, runner.head_is_direct, runner.gates.all_fused) == (True, True, True)


def _start_contiguous(model: Path, folder: Path) -> ContiguousRunner:
    loaded = load_model(model, store=StartStore(folder, MAX_BYTES))
    try:
        return ContiguousRunner(loaded)
    finally:
        loaded.facts.keep()
