"""Redis dies or hangs, or S3 hangs, at each step of a publication. (An S3 that dies: test_faults.py.)

FAULT_BOUND_S: each wait of the registry, a second by default; 0: as in the product, where a hanging S3 costs a minute
at some steps.
"""

import os
from contextlib import closing, suppress

import pytest

from shared.errors import Unavailable
from shared.registry import bucket_store, redis_index
from shared.registry.factory import open_registry
from tests.registry_servers import PUBLICATION_STEPS, Steps, shared_url

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
BOUND_S = int(os.environ.get("FAULT_BOUND_S", "1"))
BOUNDS = {redis_index: "REDIS", bucket_store: "OBJECT_STORE"}


@pytest.fixture(autouse=True)
def _bounds(monkeypatch):
    for module, prefix in BOUNDS.items() if BOUND_S else ():
        names = ("CONNECT", "ANSWER", "WAIT", "RECORD", "CONTENT", "STALL", "SENDING_STALL", "RETRY")  # fmt: skip
        for name in names:
            if hasattr(module, f"{prefix}_{name}_S"):
                monkeypatch.setattr(module, f"{prefix}_{name}_S", BOUND_S)


@pytest.mark.parametrize("fault", ["own_redis kill start", "own_redis hold resume", "own_s3 hold resume"])  # fmt: skip
def test_a_publication_is_whole_or_nothing_and_its_repetition_succeeds_once(own_redis, request, fault):
    lost, go, back = fault.split()
    server = request.getfixturevalue(lost)
    s3 = server if lost == "own_s3" else request.getfixturevalue("s3")
    url, steps = shared_url(own_redis, s3), Steps()
    with closing(open_registry(url, step=steps)) as registry:
        for number, step in enumerate(PUBLICATION_STEPS):
            model_id = f"model-{number}"
            data = model_id.encode() * 200_000

            def attempt(model_id: str = model_id, data: bytes = data) -> int:
                blobs = {"x": data}
                return registry.publish(model_id, {"a": 1}, blobs, request_id=model_id).version

            gone: list[str] = []

            def lose(step: str = step, gone: list[str] = gone) -> None:
                gone.append(step)
                getattr(server, go)()

            steps.at(step, lose)
            with suppress(Unavailable):
                assert attempt() == 1
            assert gone == [step]
            getattr(server, back)()
            with closing(open_registry(url)) as reader:
                seen = reader.list_versions(model_id)
                assert [(v.version, v.damage) for v in seen] in ([], [(1, "")])
                assert reader.aliases(model_id) == ({"latest": 1} if seen else {})
                assert all(reader.read_blob(version, "x") == data for version in seen)
            assert attempt() == 1
            (made,) = registry.list_versions(model_id)
            assert registry.read_blob(made, "x") == data
