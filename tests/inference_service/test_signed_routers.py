"""A worker that asks for signatures loads routers with one alone, and goes on with the last that had one."""

from dataclasses import replace
from pathlib import Path

import pytest

from inference_service.router_imports import import_routers
from inference_service.routers import RouterChoice, RouterStore
from shared.errors import NotFound, PreconditionFailed, RouterMismatch, Unavailable
from shared.exchange.router_files import Signer, read_files
from shared.exchange.signatures import Verifier
from shared.ladder.artefact import pack_ladder
from shared.ladder.blob_names import SIGNATURE_BLOB
from shared.ladder.folder import write_router_folder
from tests.random_ladder import random_ladder
from tests.reasons import raises
from tests.router_folders import write_keys
from tests.waiting import wait_until_async


@pytest.fixture
def folder(loaded, tmp_path: Path):
    """Writes a router of the loaded model, another for each number."""

    def write(number: int, **identity: str) -> str:
        ladder = random_ladder(loaded, number, (0,))
        ladder = replace(ladder, model=replace(ladder.model, **identity))
        write_router_folder(tmp_path / f"router-{number}", *pack_ladder(ladder, {}))
        return str(tmp_path / f"router-{number}")

    return write


async def test_an_alias_that_moves_to_an_unsigned_router_leaves_what_served(registry, loaded, folder, tmp_path):
    pytest.importorskip("model_signing", reason="no model-signing: pip install 'neap-server[sign]'")
    private, public = write_keys(tmp_path)
    other, _ = write_keys(tmp_path, "other")
    fallbacks = []
    store = RouterStore(registry, verifier=Verifier([public]), on_fallback=lambda *labels: fallbacks.append(labels[1:]))
    read_files(folder(1), "tiny", signer=Signer(private)).publish(registry, ["latest"], "test")
    first = await store.select(loaded, RouterChoice())
    assert first.version == 1
    for number, signer, reason in ((2, None, "SIGNATURE_MISSING"), (3, Signer(other), "SIGNATURE_INVALID")):
        read_files(folder(number), "tiny", signer=signer).publish(registry, ["latest"], "test")

        async def is_refused(reason=reason):
            assert (await store.select(loaded, RouterChoice())).ladder is first.ladder
            return fallbacks[-1] == ("alias", reason)

        await wait_until_async(is_refused)
        with raises(PreconditionFailed, reason):
            await store.select(loaded, RouterChoice(version=number))


async def test_a_signature_of_another_version_is_none(registry, loaded, folder, tmp_path):
    pytest.importorskip("model_signing", reason="no model-signing: pip install 'neap-server[sign]'")
    private, public = write_keys(tmp_path)
    signed = read_files(folder(1), "tiny", signer=Signer(private))
    other = read_files(folder(2), "tiny")
    stolen = replace(other, blobs={**other.blobs, SIGNATURE_BLOB: signed.blobs[SIGNATURE_BLOB]})
    stolen.publish(registry, ["latest"], "test")
    with raises(PreconditionFailed, "SIGNATURE_INVALID"):
        await RouterStore(registry, verifier=Verifier([public])).select(loaded, RouterChoice())


def test_a_router_that_a_worker_starts_with_is_published_once_for_its_weights(registry, loaded, folder):
    first, second = folder(1, model_id="elsewhere"), folder(2)
    for _ in range(2):
        import_routers([first], [loaded], registry, "latest", None)
        assert registry.aliases("tiny") == {"latest": 1}
    import_routers([second], [loaded], registry, "latest", None)
    import_routers([first], [loaded], registry, "latest", None)
    assert registry.aliases("tiny") == {"latest": 2}, "a start moves no alias for a router that was there"
    with raises(RouterMismatch, "ROUTER_MISMATCH", match="this worker serves tiny"):
        import_routers([folder(3, fingerprint="sha256:" + "0" * 64)], [loaded], registry, "latest", None)
    with raises(NotFound, "NOT_FOUND"):
        import_routers([first + "-missing"], [loaded], registry, "latest", None)


def test_a_hub_that_is_away_stops_the_first_start_alone(registry, loaded, folder):
    away = ["hf://alice/tiny"]  # tests never ask a hub
    with raises(Unavailable, "HUB_UNAVAILABLE"):
        import_routers(away, [loaded], registry, "latest", None)
    import_routers([folder(1)], [loaded], registry, "latest", None)
    import_routers(away, [loaded], registry, "latest", None)
    assert registry.aliases("tiny") == {"latest": 1}
