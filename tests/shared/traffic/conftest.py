"""Where answers are kept in these tests."""

from pathlib import Path

import obstore
import pytest

from shared.registry.address import RegistryAddress
from shared.traffic.answer import ServedAnswer
from tests.registry_damage import bucket_of
from tests.registry_servers import new_place

MODEL, HOUR = "family/tiny", 480_000


def an_answer(pool: str = "legal", *tokens: int, hour: int = HOUR, model_id: str = MODEL) -> ServedAnswer:
    return ServedAnswer(model_id, pool, 3, "cpu-float32", hour, tokens or (5, 6, 7), (8, 9))


class Objects:
    """The stored objects themselves, by their paths below the registry's root."""

    def __init__(self, place: str, request: pytest.FixtureRequest) -> None:
        self.root = None if "://" in place else Path(place)
        if self.root is None:
            s3 = request.getfixturevalue("s3")
            self.bucket = bucket_of(s3, RegistryAddress.parse(place).prefix)

    def paths(self) -> list[str]:
        if self.root is not None:
            files = [path for path in (self.root / "traffic").rglob("*") if path.is_file()]
            return sorted(str(path.relative_to(self.root)) for path in files)
        return sorted(entry["path"] for page in obstore.list(self.bucket, "traffic/") for entry in page)

    def read(self, path: str) -> bytes:
        if self.root is not None:
            return (self.root / path).read_bytes()
        return bytes(obstore.get(self.bucket, path).bytes())

    def write(self, path: str, data: bytes) -> None:
        if self.root is not None:
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_bytes(data)
        else:
            obstore.put(self.bucket, path, data)


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest) -> str:
    return new_place(request.param, request)


@pytest.fixture
def objects(place: str, request: pytest.FixtureRequest) -> Objects:
    return Objects(place, request)
