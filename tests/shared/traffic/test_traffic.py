"""What is kept of answers is read once, by its own pool, and removed when it should be; what is damaged is left out."""

import errno
import json
import os
import sys
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from shared.digests import digest_of
from shared.errors import Corrupt, Exhausted, InvalidInput
from shared.pool_names import check_pool
from shared.registry.factory import open_store
from shared.registry.folder_store import FolderStore
from shared.registry.store import StoredObject
from shared.traffic.answer import HOUR_S, ServedAnswer
from shared.traffic.encoding import MAX_CONTENT_BYTES, MAX_OBJECT_BYTES, decode, encode
from shared.traffic.traffic import EXPIRE_EVERY_S, Traffic, open_traffic
from tests.shared.traffic.conftest import HOUR, MODEL, Objects, an_answer
from tests.small_disk import run_on_small_disk

KEY = bytes(range(32))


def as_lists(answers: tuple[ServedAnswer, ...]) -> list[tuple[object, ...]]:
    return [
        (a.model_id, a.pool, a.router_version, a.numerics_id, a.hour, list(a.prompt_ids), list(a.answer_ids), a.id)
        for a in answers
    ]


def path_of(data: bytes, *, pool: str = "legal", hour: int = HOUR, num_tokens: int = 5, model: str = MODEL) -> str:
    hexadecimal = digest_of(data).removeprefix("sha256:")
    return f"traffic/{model.replace('/', '!')}/{pool}/{hour:08d}-{num_tokens:08d}-{hexadecimal}"


def test_an_answer_comes_back_as_it_was_and_once(place: str) -> None:
    writer, reader = open_traffic(place), open_traffic(place)
    first, second = an_answer("legal", 2**32 - 1, 0), an_answer("legal", 1, hour=HOUR + 1)
    writer.write([second, first])
    read = reader.read(MODEL, "legal")
    assert as_lists(read.answers) == as_lists((first, second))
    assert not read.skipped
    late = an_answer("legal", 4, hour=HOUR - 1000)  # of a worker whose clock is behind
    writer.write([late])
    assert as_lists(reader.read(MODEL, "legal").answers) == as_lists((late, first, second))


def test_two_pools_and_two_models_are_apart(place: str) -> None:
    traffic = open_traffic(place)
    answers = [
        an_answer(pool, token, model_id=model)
        for token, (model, pool) in enumerate([("a", "one"), ("a", "two"), ("b", "one"), ("a/b", "one")])
    ]
    traffic.write(answers)
    assert sorted(traffic.models()) == ["a", "a/b", "b"]
    assert traffic.pools("a") == ["one", "two"]
    for answer in answers:
        assert as_lists(traffic.read(answer.model_id, answer.pool).answers) == as_lists((answer,))
    assert traffic.read("a", "three").answers == ()


@pytest.mark.parametrize("key", [None, KEY])
def test_an_object_that_was_moved_to_another_pool_model_or_hour_is_not_read(
    place: str, objects: Objects, key: bytes | None
) -> None:
    traffic = Traffic(open_store(place), key)
    traffic.write([an_answer("legal")])
    (path,) = objects.paths()
    data = objects.read(path)
    objects.write(path_of(data, pool="shop"), data)
    objects.write(path_of(data, model="other"), data)
    for model, pool in ((MODEL, "shop"), ("other", "legal")):
        read = traffic.read(model, pool)
        assert read.answers == ()
        assert read.skipped == {"CORRUPT": 1}
    assert not traffic.read(MODEL, "legal").skipped
    objects.write(path_of(data, hour=HOUR + 1), data)
    read = traffic.read(MODEL, "legal")
    assert len(read.answers) == 1
    assert read.skipped == {"CORRUPT": 1}


def forged(content: bytes, num_bytes: int | None = None, **changed: object) -> bytes:
    head = b"NEAPTRAF" + bytes([int(changed.get("version", 1)), int(changed.get("encrypted", 0))])  # type: ignore[call-overload]
    return head + (len(content) if num_bytes is None else num_bytes).to_bytes(4, "little") + zlib.compress(content)


def contents_of(data: bytes) -> bytes:
    return zlib.decompress(data[14:])


@cache  # to compress a bomb takes a quarter of a second
def broken_objects() -> dict[str, bytes]:
    whole = encode([an_answer()])
    content = contents_of(whole)
    return {
        "empty": b"",
        "cut within the head": whole[:9],
        "cut": whole[:-1],
        "longer": whole + b"x",
        "another magic": b"X" + whole[1:],
        "another version": forged(content, version=2),
        "a flag that is none": forged(content, encrypted=2),
        "encrypted, it says": forged(content, encrypted=1),
        "not compressed": whole[:14] + content,
        "larger than it says": forged(content, len(content) - 1),
        "smaller than it says": forged(content, len(content) + 1),
        "a size above the limit": forged(content, MAX_CONTENT_BYTES + 1),
        "a bomb": forged(b"\0" * (64 << 20), len(content)),
        "bytes of no answer": forged(content + b"x"),
        "contents that are cut": forged(content[:-4]),
        "four thousand million answers": forged(content.replace(b"\1\0\0\0", b"\xff\xff\xff\xff", 1)),
        "an answer of four thousand million tokens": forged(content.replace(b"\3\0\0\0\2\0\0\0", b"\xff" * 8)),
        "a pool that is no text": forged(content.replace(b"legal", b"leg\xffl")),
    }


@pytest.mark.parametrize("kind", broken_objects())
def test_a_broken_object_is_left_out_and_counted(tmp_path: Path, kind: str) -> None:
    data = broken_objects()[kind]
    traffic, objects = open_traffic(str(tmp_path)), Objects(str(tmp_path), None)  # type: ignore[arg-type]
    traffic.write([an_answer("legal", 1)])
    objects.write(path_of(data), data)
    read = traffic.read(MODEL, "legal")
    assert [list(answer.prompt_ids) for answer in read.answers] == [[1]]
    assert read.skipped == {"CORRUPT": 1}


def test_a_bomb_takes_no_more_memory_than_an_object_may() -> None:
    data = broken_objects()["a bomb"]
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt):
            decode(data, MODEL, "legal", HOUR)
        assert tracemalloc.get_traced_memory()[1] < 2 * MAX_CONTENT_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("harm", ["flip", "another's bytes", "number of tokens", "too large"])
def test_an_object_that_is_not_what_its_name_says_is_left_out(
    place: str, objects: Objects, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    data = encode([an_answer()])
    if harm == "flip":
        objects.write(path_of(data), data[:-1] + bytes([data[-1] ^ 1]))
    elif harm == "another's bytes":
        objects.write(path_of(data), encode([an_answer()]))
    elif harm == "number of tokens":
        objects.write(path_of(data, num_tokens=20_000), data)
    else:
        store = open_store(place)
        huge = bytes(MAX_OBJECT_BYTES + 1)
        objects.write(path_of(huge), huge)
        monkeypatch.setattr("shared.traffic.traffic.digest_of", lambda data: pytest.fail("it was read"))
        assert Traffic(store).read(MODEL, "legal").skipped == {"CORRUPT": 1}
        return
    assert open_traffic(place).read(MODEL, "legal").skipped == {"CORRUPT": 1}


def test_what_has_another_name_is_not_even_read(place: str, objects: Objects) -> None:
    traffic = open_traffic(place)
    data = encode([an_answer()])
    name = path_of(data)
    for other in (name + "0", name.replace("00480000", "480000"), "traffic/family!tiny/legal/x", name + ".part"):
        objects.write(other, data)
    assert traffic.batches(MODEL, "legal") == []
    assert traffic.read(MODEL, "legal").answers == ()
    assert traffic.forget("legal").num_objects == 4  # what is not ours is removed all the more


def test_an_answer_that_is_there_twice_counts_once(place: str) -> None:
    traffic = open_traffic(place)
    twice, once = an_answer("legal", 1), an_answer("legal", 2)
    traffic.write([twice, twice])
    traffic.write([twice, once])
    traffic.write([twice, once])  # the same bytes: the same object
    read = traffic.read(MODEL, "legal")
    assert len(traffic.batches(MODEL, "legal")) == 2
    assert sorted(as_lists(read.answers)) == sorted(as_lists((once, twice)))
    assert read.skipped == {"REPEATED": 2}


def test_a_read_is_bounded_and_takes_the_newest(place: str) -> None:
    traffic = open_traffic(place)
    for number in range(5):
        traffic.write([an_answer("legal", number, hour=HOUR + number)])  # 3 tokens each
    read = traffic.read(MODEL, "legal", max_tokens=4)
    assert [answer.hour - HOUR for answer in read.answers] == [3, 4]
    assert read.skipped == {"TOO_MANY_TOKENS": 3}


def test_many_answers_become_several_objects_below_the_limit(tmp_path: Path) -> None:
    traffic = open_traffic(str(tmp_path))
    size = MAX_CONTENT_BYTES // 4 // 3
    answers = [an_answer("legal", *range(number, number + size)) for number in range(4)]
    traffic.write(answers)
    assert [batch.num_tokens for batch in traffic.batches(MODEL, "legal")] == [2 * (size + 2)] * 2
    assert len(traffic.read(MODEL, "legal").answers) == 4
    with pytest.raises(Corrupt, match="too long"):
        traffic.write([an_answer("shop"), an_answer("legal", *range(MAX_CONTENT_BYTES // 4))])
    assert traffic.pools(MODEL) == ["legal"]


def test_the_name_says_how_many_tokens_there_are(place: str) -> None:
    traffic = open_traffic(place)
    traffic.write([an_answer("legal", 1, 2, 3), an_answer("legal", 4)])
    (batch,) = traffic.batches(MODEL, "legal")
    assert (batch.hour, batch.num_tokens) == (HOUR, 8)
    assert abs(time.time() - batch.stored.last_modified_s) < 3600


def test_forget_removes_a_pool_of_all_models_or_the_hours_before_a_time(place: str) -> None:
    traffic = open_traffic(place)
    traffic.write([an_answer(pool, hour=HOUR + n, model_id=m) for pool in "ab" for n in range(3) for m in "xy"])
    assert traffic.forget("a", model_id="x", before_s=(HOUR + 1) * HOUR_S).num_objects == 1
    # The hour that has begun before goes, too: some of its answers may be from before.
    assert traffic.forget("a", model_id="x", before_s=(HOUR + 1) * HOUR_S + 1).num_objects == 1
    assert [answer.hour - HOUR for answer in traffic.read("x", "a").answers] == [2]
    assert len(traffic.read("y", "a").answers) == 3
    removed = traffic.forget("a")
    assert removed.num_objects == 4
    assert removed.num_bytes > 100
    for model in "xy":
        assert traffic.read(model, "a").answers == ()
        assert len(traffic.read(model, "b").answers) == 3
    assert traffic.forget("a").num_objects == 0


@pytest.mark.parametrize("pool", ["", "../legal", "LEGAL", "a/b", "a@b", "-a", "a" * 33, "*"])
def test_no_other_names_of_pools(tmp_path: Path, pool: str) -> None:
    traffic = open_traffic(str(tmp_path))
    for call in (check_pool, traffic.forget, lambda p: traffic.read(MODEL, p), lambda p: traffic.write([an_answer(p)])):
        with pytest.raises(InvalidInput, match="pool"):
            call(pool)


def test_what_is_older_than_the_retention_is_removed_whatever_its_name_says(tmp_path: Path) -> None:
    traffic = open_traffic(str(tmp_path))
    now_s, day_s = time.time(), 24 * 3600
    for age_days in (-30, -0.5, 0, 6.9, 7.1, 400):
        traffic.write([an_answer("legal", 1000 + int(age_days))])
        newest = max((tmp_path / "traffic").rglob("0*"), key=lambda path: path.stat().st_ctime)
        os.utime(newest, (now_s - age_days * day_s,) * 2)
    assert traffic.expire().num_objects == 3  # the one from the future, too: its time would not come
    left = {int(answer.prompt_ids[0]) for answer in traffic.read(MODEL, "legal").answers}
    assert left == {1000, 1006}  # -.5 and 0 days are alike here
    assert list((tmp_path / "parts").iterdir()) == []


def test_the_store_s_clock_decides_how_old_an_object_is(place: str) -> None:
    traffic = open_traffic(place)
    traffic.write([an_answer("legal", hour=1)])
    assert traffic.expire(3600).num_objects == 0
    assert traffic.expire(-1).num_objects == 1


def test_of_many_workers_one_lists_all_that_is_kept_and_another_an_hour_later(tmp_path: Path) -> None:
    class Counted(FolderStore):
        num_listed = 0

        def objects(self, folder: str) -> Iterator[StoredObject]:
            Counted.num_listed += folder == "traffic"
            return super().objects(folder)

    def ask(number: int) -> list[bool]:
        # Workers that start in turn: what one has done is not in another's memory.
        return [Traffic(Counted(tmp_path)).expire_if_due() is not None for _ in range(number)]

    open_traffic(str(tmp_path)).write([an_answer()])
    assert ask(50) == [True] + 49 * [False]
    notes = [path for path in (tmp_path / "notes").iterdir() if "traffic" in path.name]
    for age_s, begins in ((EXPIRE_EVERY_S - 60, False), (EXPIRE_EVERY_S + 60, True), (-EXPIRE_EVERY_S, True)):
        os.utime(notes[0], (time.time() - age_s,) * 2)
        num_listed = Counted.num_listed
        assert ask(9) == [begins] + 8 * [False]
        assert Counted.num_listed == num_listed + begins


def test_what_a_killed_process_had_begun_to_write_is_removed_after_a_day(tmp_path: Path) -> None:
    traffic = open_traffic(str(tmp_path))
    traffic.write([an_answer()])
    for name, age_s in (("a" * 32, 25 * 3600), ("b" * 32, 3600), ("notes", 25 * 3600)):
        (tmp_path / "parts" / name).write_bytes(b"secret")
        os.utime(tmp_path / "parts" / name, (time.time() - age_s,) * 2)
    assert traffic.expire().num_objects == 1
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == ["b" * 32, "notes"]


@pytest.mark.parametrize("step", ["part:traffic", "synced:traffic", "linked:traffic"])
def test_a_full_disk_leaves_whole_objects_alone(tmp_path: Path, step: str) -> None:
    def full(name: str) -> None:
        if name == step:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(Exhausted) as raised:
        Traffic(open_store(str(tmp_path), step=full)).write([an_answer()])
    assert raised.value.reason == "DISK_FULL"
    assert list((tmp_path / "parts").iterdir()) == []
    read = open_traffic(str(tmp_path)).read(MODEL, "legal")
    assert len(read.answers) == (step == "linked:traffic")
    assert not read.skipped


FILL = """
import json, sys
from pathlib import Path
from shared.errors import NeapError
from shared.traffic.answer import ServedAnswer
from shared.traffic.traffic import open_traffic
root, ballast = Path(sys.argv[1]) / "registry", Path(sys.argv[1]) / "ballast"
traffic, said = open_traffic(str(root)), []
for is_full in (False, True, False):
    try:
        with ballast.open("wb", buffering=0) as file:
            while is_full and file.write(b"x" * 4096):
                pass
    except OSError:
        pass
    try:
        traffic.write([ServedAnswer("tiny", "legal", 0, "n", 480_000, range(60_000 + len(said)), [1])])
        said.append("written")
    except NeapError as error:
        said.append(error.reason)
    ballast.unlink()
read = traffic.read("tiny", "legal")
print(json.dumps([*said, len(read.answers), read.skipped, len(list((root / "parts").iterdir()))]))
"""


def test_a_file_system_that_is_really_full(tmp_path: Path) -> None:
    said = run_on_small_disk(tmp_path, "2m", sys.executable, "-c", FILL, tmp_path)
    assert json.loads(said) == ["written", "DISK_FULL", "written", 2, {}, 0]


@pytest.mark.parametrize("step", ["part:traffic", "synced:traffic", "linked:traffic"])
def test_a_writer_that_is_killed_leaves_whole_objects_alone(tmp_path: Path, step: str) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            Traffic(
                open_store(str(tmp_path), step=lambda name: os.kill(os.getpid(), 9) if name == step else None)
            ).write([an_answer()])
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
    read = open_traffic(str(tmp_path)).read(MODEL, "legal")
    assert len(read.answers) == (step == "linked:traffic")
    assert not read.skipped


def test_other_users_of_the_machine_cannot_read_what_is_kept(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        open_traffic(str(tmp_path)).write([an_answer()])
    finally:
        os.umask(before)
    (file,) = (path for path in (tmp_path / "traffic").rglob("*") if path.is_file())
    assert file.stat().st_mode & 0o777 == 0o640


def test_what_is_encrypted_needs_its_key_and_is_not_read_beside_what_is_not(place: str, objects: Objects) -> None:
    sealed, plain = Traffic(open_store(place), KEY), open_traffic(place)
    sealed.write([an_answer("legal", 1)])
    (path,) = objects.paths()
    assert MODEL.encode() not in objects.read(path)
    assert as_lists(sealed.read(MODEL, "legal").answers)[0][5] == [1]
    assert plain.read(MODEL, "legal").skipped == {"CORRUPT": 1}
    assert Traffic(open_store(place), KEY[::-1]).read(MODEL, "legal").skipped == {"CORRUPT": 1}
    plain.write([an_answer("legal", 2)])  # whoever has no key cannot forge
    assert [list(answer.prompt_ids) for answer in sealed.read(MODEL, "legal").answers] == [[1]]


@pytest.mark.parametrize("text", ["", "ab" * 31, "ab" * 33, "zz" * 32, "\xff"])
def test_a_file_that_is_no_key_is_refused_without_its_text(tmp_path: Path, text: str) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    for path in (file, tmp_path / "absent"):
        with pytest.raises(InvalidInput) as raised:
            open_traffic(str(tmp_path / "registry"), path)
        assert raised.value.reason == "BAD_TRAFFIC_KEY"
        assert not text or text not in raised.value.message
    file.write_text(KEY.hex() + "\n")
    open_traffic(str(tmp_path / "registry"), file)


def test_the_contents_are_the_fields_of_an_answer_and_no_more() -> None:
    """Byte by byte, as the format says."""
    answer = an_answer("legal", 2**31)
    expected = b"\x0b\0family/tiny" + b"\5\0legal" + HOUR.to_bytes(4, "little") + b"\1\0\0\0"
    expected += answer.id + b"\3\0\0\0" + b"\x0b\0cpu-float32" + b"\1\0\0\0" + b"\2\0\0\0"
    expected += b"\0\0\0\x80" + b"\x08\0\0\0" + b"\x09\0\0\0"
    data = encode([answer])
    assert contents_of(data) == expected
    assert data[:14] == b"NEAPTRAF" + b"\1\0" + len(expected).to_bytes(4, "little")
    assert {field.name for field in fields(answer)} == {
        "model_id", "pool", "router_version", "numerics_id", "hour", "prompt_ids", "answer_ids", "id",
    }  # fmt: skip
    assert an_answer().id != an_answer().id
