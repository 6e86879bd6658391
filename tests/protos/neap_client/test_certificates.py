"""Clients check the files of their certificates, and use rotated ones."""

import asyncio
import gc
import threading

import psutil
import pytest
import trustme
from neap_client import ClientSecurity, NeapClient
from neap_client.inference.v1 import inference_pb2

from shared.errors import InvalidInput, Unavailable
from shared.rpc.access import Access
from shared.rpc.certificates import ServerCertificate
from shared.rpc.security import ServerSecurity
from tests import certificates
from tests.reasons import raises
from tests.shared.rpc.conftest import running
from tests.waiting import wait_until


def num_connections(port):
    """How many connections of this process lead to `port`. Channels that only garbage holds are closed first."""
    gc.collect()
    found = psutil.Process().net_connections("tcp")
    return sum(one.status == "ESTABLISHED" and one.raddr.port == port for one in found)


def test_rotated_certificates_are_used_and_running_calls_go_on(scripted, make_client, tmp_path):
    authority, other = trustme.CA(), trustme.CA()
    theirs = certificates.write(tmp_path / "server", certificates.issued(authority, "127.0.0.1"))
    ours = certificates.mount(tmp_path / "client", certificates.issued(authority, "client"))
    certificate = ServerCertificate(theirs.certificate, theirs.key, theirs.authority)
    security = ClientSecurity(ca=theirs.authority, certificate=ours.certificate, key=ours.key)
    released = threading.Event()

    async def generate(request, context):
        yield inference_pb2.GenerateResponse(chunk=inference_pb2.TokenChunk(text="a"))
        await asyncio.to_thread(released.wait, 60)
        yield inference_pb2.GenerateResponse(chunk=inference_pb2.TokenChunk(text="b"))

    scripted.on_generate = generate
    with (
        running(scripted, security=ServerSecurity(certificate, Access())) as server,
        make_client(server.target, security=security, num_attempts=1) as client,
    ):
        port = int(server.target.rpartition(":")[2])
        stream = client.generate(inference_pb2.GenerateRequest())
        texts = [next(stream).chunk.text]
        certificates.mount(tmp_path / "client", certificates.issued(other, "client"))
        with pytest.raises(Unavailable):
            client.get_model("m")
        # Files that cannot be used change nothing.
        certificates.mount(tmp_path / "client", dict.fromkeys(("tls.crt", "tls.key"), b"half"))
        with pytest.raises(Unavailable):
            client.get_model("m")
        certificates.mount(tmp_path / "client", certificates.issued(authority, "client"))
        client.get_model("m")
        assert num_connections(port) == 2
        released.set()
        texts += [event.chunk.text for event in stream]
        assert texts == ["a", "b"]
        del stream
        wait_until(lambda: num_connections(port) == 1)


def test_certificates_that_cannot_be_used_are_an_error(tmp_path):
    one = certificates.write(tmp_path / "one", certificates.issued(trustme.CA(), "client"))
    two = certificates.write(tmp_path / "two", certificates.issued(trustme.CA(), "client"))
    half = tmp_path / "half"
    half.write_bytes(one.certificate.read_bytes()[:200])
    for files in (
        {"ca": half},
        {"certificate": half, "key": one.key},
        {"certificate": one.certificate, "key": half},
        {"certificate": one.certificate, "key": two.key},
    ):
        with raises(InvalidInput, "BAD_CERTIFICATE", match=str(tmp_path)):
            NeapClient("127.0.0.1:1", security=ClientSecurity(**files))


def test_a_certificate_needs_its_key(tmp_path):
    """gRPC would end the process."""
    files = certificates.write(tmp_path, certificates.issued(trustme.CA(), "client"))
    for given in ({"certificate": files.certificate}, {"key": files.key}):
        with raises(InvalidInput, "BAD_CONFIGURATION"):
            ClientSecurity(**given)
