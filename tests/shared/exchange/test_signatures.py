"""Signatures of routers: what was signed is accepted, and nothing else. The library's own verifier agrees."""

import importlib
import json
from copy import deepcopy
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from shared.errors import Corrupt, InvalidInput, PreconditionFailed
from shared.exchange.signatures import Verifier, sign, signed_files, verifier_of
from shared.ladder.blob_names import LADDER_BLOB, SIGNATURE_BLOB, blob_entry
from shared.ladder.folder import read_router_folder
from tests.certificates import issued, write
from tests.reasons import raises
from tests.router_folders import write_keys, write_router

pytest.importorskip("model_signing", reason="no model-signing: pip install 'neap-server[sign]'")
WHAT = "the router"
MANIFEST = {"model": {"id": "tiny"}, "proposers": [{"agreement": 0.25}]}
ENTRIES = {LADDER_BLOB: blob_entry(b"ladder"), "statistics.safetensors": blob_entry(b"sums")}


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return write_keys(tmp_path)


def test_what_was_signed_is_accepted_whoever_else_is_trusted(keys, tmp_path):
    private, public = keys
    signature = sign(signed_files(MANIFEST, ENTRIES), private)
    _, other = write_keys(tmp_path, "other")
    for trusted in ([public], [other, public]):
        Verifier(trusted).check(signed_files(MANIFEST, ENTRIES), signature, WHAT)
    with_signature = {**ENTRIES, SIGNATURE_BLOB: blob_entry(signature)}
    Verifier([public]).check(signed_files(MANIFEST, with_signature), signature, WHAT)
    with raises(PreconditionFailed, "SIGNATURE_INVALID"):
        Verifier([other]).check(signed_files(MANIFEST, ENTRIES), signature, WHAT)
    assert verifier_of([]) is None


def changed(manifest: dict, entries: dict, what: str) -> None:
    if what == "a figure":
        manifest["proposers"][0]["agreement"] = 0.26
    elif what == "a digest":
        entries[LADDER_BLOB] = blob_entry(b"laddes")
    elif what == "a file less":
        del entries["statistics.safetensors"]
    else:
        entries["more.safetensors"] = blob_entry(b"")


@pytest.mark.parametrize("what", ["a figure", "a digest", "a file less", "a file more"])
def test_other_contents_are_refused(keys, what):
    private, public = keys
    signature = sign(signed_files(MANIFEST, ENTRIES), private)
    manifest, entries = deepcopy(MANIFEST), deepcopy(ENTRIES)
    changed(manifest, entries, what)
    with raises(PreconditionFailed, "SIGNATURE_INVALID"):
        Verifier([public]).check(signed_files(manifest, entries), signature, WHAT)


def test_signatures_that_are_none_are_refused(keys):
    private, public = keys
    files = signed_files(MANIFEST, ENTRIES)
    bundle = json.loads(sign(files, private))
    bundle["dsseEnvelope"]["payload"] = bundle["dsseEnvelope"]["payload"][::-1]
    for signature in (b"", b"{}", b"[" * 100_000, b"\xff", json.dumps(bundle).encode()):
        with raises(PreconditionFailed, "SIGNATURE_INVALID"):
            Verifier([public]).check(files, signature, WHAT)
    with raises(PreconditionFailed, "SIGNATURE_MISSING"):
        Verifier([public]).check(files, None, WHAT)
    with raises(Corrupt, "ROUTER_TOO_LARGE"):
        Verifier([public]).check(files, b" " * (1 << 19), WHAT)


def test_a_certificate_counts_if_a_trusted_authority_has_issued_it(tmp_path):
    authority, stranger = trustme.CA(), trustme.CA()
    files = signed_files(MANIFEST, ENTRIES)
    of = {name: write(tmp_path / name, issued(ca, "signer")) for name, ca in (("a", authority), ("b", stranger))}
    signature = sign(files, of["a"].key, [of["a"].certificate])
    Verifier([of["a"].authority]).check(files, signature, WHAT)
    with raises(PreconditionFailed, "SIGNATURE_INVALID"):
        Verifier([of["b"].authority]).check(files, signature, WHAT)
    with raises(InvalidInput, "BAD_KEY"):  # of another key
        sign(files, of["a"].key, [of["b"].certificate])


def test_files_that_are_no_keys_are_refused_at_once(keys, tmp_path):
    private, public = keys
    edwards = ed25519.Ed25519PrivateKey.generate()
    encrypted = load_pem_private_key(private.read_bytes(), None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    )
    wrong = {
        "edwards": edwards.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        "encrypted": encrypted,
        "text": b"key",
        "certificate": b"-----BEGIN CERTIFICATE-----\n",
        "public": public.read_bytes(),
    }
    for name, data in wrong.items():
        (tmp_path / name).write_bytes(data)
        with raises(InvalidInput, "BAD_KEY"):
            sign(signed_files(MANIFEST, ENTRIES), tmp_path / name)
        if name != "public":
            with raises(InvalidInput, "BAD_KEY"):
                Verifier([tmp_path / name])
    with raises(InvalidInput, "BAD_KEY"):
        Verifier([tmp_path / "missing"])


def test_a_library_that_is_missing_is_named(keys, monkeypatch):
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("shared.exchange.files.import_module", absent)
    with raises(PreconditionFailed, "EXTRA_MISSING", match=r"pip install 'neap-server\[sign\]'"):
        Verifier([keys[1]])


def test_the_librarys_own_verifier_accepts_the_folder_as_it_is(keys, tmp_path):
    private, public = keys
    folder = write_router(tmp_path / "router")
    manifest, blobs = read_router_folder(folder)
    files = signed_files(manifest, {name: blob_entry(data) for name, data in blobs.items()})
    (folder / SIGNATURE_BLOB).write_bytes(sign(files, private))
    (folder / "README.md").write_text("may say anything")

    def verify() -> None:
        # One configuration is for one folder: the library keeps what it has found out.
        config = importlib.import_module("model_signing.verifying").Config()
        config.use_elliptic_key_verifier(public_key=public).verify(folder, folder / SIGNATURE_BLOB)

    verify()
    (folder / LADDER_BLOB).write_bytes(b"other")
    with pytest.raises(ValueError, match="mismatch"):
        verify()
