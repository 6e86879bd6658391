"""Files are written whole or not at all, and a full disk is reported as such."""

import errno
import json
import os
import sys

import grpc
import pytest

from calibrator_service.calibration.files import write_atomically
from calibrator_service.calibration.text.shards import TokenSequence, read_shard, write_shard
from shared.errors import Exhausted, NeapError
from shared.rpc.status import code_of
from tests.small_disk import run_on_small_disk

FILL = """
import json, sys
from pathlib import Path
from calibrator_service.calibration.files import write_atomically
from shared.errors import Exhausted
path = Path(sys.argv[1]) / "states" / "a"
write_atomically(path, b"old" * 1000)
try:
    write_atomically(path, b"new" * 1_000_000)
except Exhausted as error:
    left = [file.name for file in path.parent.iterdir()]
    print(json.dumps([error.reason, error.metadata, left, path.read_bytes() == b"old" * 1000]))
write_atomically(path.with_name("b"), b"fits")
"""


def test_a_shard_is_read_back(tmp_path):
    sequences = [TokenSequence((1, 2, 3), 2), TokenSequence((4,), 1), TokenSequence((5, 6), 0)]
    write_shard(tmp_path / "new" / "a", sequences)
    assert read_shard(tmp_path / "new" / "a") == sequences
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a"]


def test_really_full_file_system(tmp_path):
    """The old file stays, no part of the new one remains, and smaller files can still be written."""
    said = run_on_small_disk(tmp_path, "512k", sys.executable, "-c", FILL, tmp_path)
    assert json.loads(said) == ["DISK_FULL", {"errno": "ENOSPC"}, ["a"], True]


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errno.EDQUOT, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errno.EIO, grpc.StatusCode.UNAVAILABLE),
    ],
)
def test_disk_errors_have_statuses_of_their_own(tmp_path, monkeypatch, number, code):
    def refuse(descriptor: int) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(NeapError) as raised:
        write_atomically(tmp_path / "a", b"data")
    assert code_of(raised.value) is code
    assert raised.value.metadata == {"errno": errno.errorcode[number]}
    assert "refused" not in raised.value.message
    if isinstance(raised.value, Exhausted):
        assert raised.value.retry_after_s is None
    assert list(tmp_path.iterdir()) == []
