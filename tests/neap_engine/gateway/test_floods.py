"""One client, known or not, takes neither the gateway's memory nor its places from the others."""

import asyncio
import json
import socket
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
from neap_client.inference.v1 import inference_pb2 as pb

from neap_engine.gateway import app
from neap_engine.gateway import body as body_module
from neap_engine.gateway.answers import chat_logprobs, text_logprobs
from neap_engine.gateway.clients import address_key
from neap_engine.gateway.collected import Collected
from shared.rpc import addresses
from shared.rpc.access import Access
from shared.rpc.callers import Role
from shared.rpc.security import ServerSecurity
from tests.gateways import chat_body, chunk, finished, gateway_to, scripted_worker, started
from tests.tokens import write_tokens
from tests.waiting import wait_until

CHAT = "/v1/chat/completions"
CALLERS = {"ann": (Role.GENERATE,), "bob": (Role.GENERATE,), "eve": (Role.CALIBRATE,)}


@pytest.fixture
def go_on():
    """Set to let calls with the model "held" end."""
    event = threading.Event()
    yield event
    event.set()


async def until(go_on):
    while not go_on.is_set():
        await asyncio.sleep(0.01)


def answered(request, go_on, *chunks):
    wait = [until(go_on)] if request.model_id == "held" else []
    return [started(), *chunks, *wait, finished()]


@pytest.fixture
def secure(tmp_path, go_on):
    """(a worker that asks for tokens, the headers of each caller)."""
    tokens = write_tokens(tmp_path / "tokens", CALLERS)

    security = ServerSecurity(None, Access(tmp_path / "tokens"))
    headers = {name: {"authorization": f"Bearer {token}"} for name, token in tokens.items()}
    with scripted_worker(lambda request: answered(request, go_on, chunk("a")), security) as worker:
        yield worker, headers


def head(num_bytes, headers, *more):
    given = [f"{name}: {value}" for name, value in headers.items()]
    lines = [f"POST {CHAT} HTTP/1.1", "host: x", f"content-length: {num_bytes}", "connection: close", *given, *more]
    return "\r\n".join([*lines, "", ""]).encode()


@contextmanager
def connected(gateway, address="127.0.0.1"):
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=60, source_address=(address, 0)) as connection:
        yield connection


def status_and_code(gateway, headers, **fields):
    reply = gateway.http.post(CHAT, json=chat_body(**fields), headers=headers)
    return reply.status_code, reply.json().get("error", {}).get("code")


@pytest.mark.parametrize("name", [None, "eve"], ids=["no token", "a role that may not"])
def test_the_body_of_one_who_may_not_generate_is_not_kept(secure, name):
    worker, headers = secure
    body = json.dumps(chat_body(n=16, user="x" * (24 << 20))).encode()
    with gateway_to(worker.target) as gateway, ExitStack() as stack:
        # On a busy machine the gateway may not have reached its worker yet.
        wait_until(lambda: status_and_code(gateway, headers.get(name))[0] != 503)
        expected = status_and_code(gateway, headers.get(name))
        assert expected in ((401, "invalid_api_key"), (403, "role_missing"))
        connections = [stack.enter_context(connected(gateway)) for _ in range(4)]
        whole = head(len(body), headers.get(name, {})) + body
        tracemalloc.start()
        try:
            for connection in connections:
                connection.sendall(whole)
            # Each has sent all of its body before it reads, as most clients do, and gets the answer.
            answers = [connection.makefile("rb").read() for connection in connections]
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        for answer in answers:
            assert answer.startswith(f"HTTP/1.1 {expected[0]} ".encode())
            assert expected[1].encode() in answer
        # What is on its way through the sockets and buffers of four connections takes a few MB.
        assert peak_bytes < len(body)


def test_workers_are_asked_once_for_a_token_they_know(secure):
    worker, headers = secure
    with gateway_to(worker.target) as gateway:
        for _ in range(3):
            assert status_and_code(gateway, headers["ann"])[0] == 200
        # Whether calls without a token may generate, and whether this token may.
        assert worker.worker.num_questions == 1
        refused = [status_and_code(gateway, {})[0] for _ in range(3)]
        assert refused == [401] * 3
        assert worker.worker.num_questions == 1


def test_a_token_that_was_refused_can_be_used_once_the_workers_know_it(secure, tmp_path):
    worker, headers = secure
    path = tmp_path / "tokens"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith("bob ")))
    with gateway_to(worker.target) as gateway:
        assert status_and_code(gateway, headers["bob"]) == (401, "invalid_api_key")
        path.write_text("".join(lines))
        assert status_and_code(gateway, headers["bob"]) == (200, None)
        path.write_text("".join(line for line in lines if not line.startswith("bob ")))
        # The answer about the token is remembered, but the worker checks every call.
        assert status_and_code(gateway, headers["bob"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("sender", ["ann", "a stranger"])
def test_half_sent_requests_take_no_place(secure, sender):
    worker, headers = secure
    with gateway_to(worker.target, max_requests=2) as gateway, ExitStack() as stack:
        assert status_and_code(gateway, headers["ann"])[0] == 200
        for _ in range(20):
            connection = stack.enter_context(connected(gateway))
            connection.sendall(head(10, headers.get(sender, {}), "expect: 100-continue") + b"{")
            # The gateway asks for the body of one who may generate.
            first = b"HTTP/1.1 100" if sender in headers else b"HTTP/1.1 401"
            assert connection.recv(100).startswith(first)
        for name in ("ann", "bob"):
            assert status_and_code(gateway, headers[name]) == (200, None)


@contextmanager
def holding(gateway, headers, num_requests, **fields):
    """`num_requests` that are answered when `go_on` is set, while the block runs."""
    before = gateway.gateway.num_running
    with ThreadPoolExecutor(num_requests) as pool:
        asked = [pool.submit(status_and_code, gateway, headers, model="held", **fields) for _ in range(num_requests)]
        wait_until(lambda: gateway.gateway.num_running == before + num_requests)
        yield asked


def test_a_client_has_a_share_of_the_places(secure, go_on):
    worker, headers = secure
    with gateway_to(worker.target, max_requests=4) as gateway, holding(gateway, headers["ann"], 2) as of_ann:
        assert status_and_code(gateway, headers["ann"]) == (429, "client_limit")
        spelt = {"authorization": headers["ann"]["authorization"].replace("Bearer ", "bEaReR  ")}
        assert status_and_code(gateway, spelt) == (429, "client_limit")
        with holding(gateway, headers["bob"], 1) as of_bob:
            assert status_and_code(gateway, headers["bob"]) == (429, "client_limit")
            reply = gateway.http.get("/v1/models", headers=headers["ann"])
            assert reply.status_code == 200
            go_on.set()
        assert [asked.result() for asked in of_ann + of_bob] == [(200, None)] * 3
        assert gateway.gateway.num_running == 0


def test_no_more_requests_run_than_there_are_places(secure, go_on):
    worker, headers = secure
    with gateway_to(worker.target, max_requests=1) as gateway, holding(gateway, headers["ann"], 1):
        reply = gateway.http.post(CHAT, json=chat_body(), headers=headers["bob"])
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        assert reply.json()["error"]["code"] == "gateway_full"
        assert gateway.http.get("/healthz").status_code == 200
        go_on.set()


def test_a_client_has_a_share_of_the_bytes_which_counts_a_prompt_for_each_choice(secure, go_on):
    worker, headers = secure
    large = {"messages": [{"role": "user", "content": "x" * 900_000}]}
    with gateway_to(worker.target, body_budget_mb=8, max_body_mb=1) as gateway:
        assert status_and_code(gateway, headers["ann"], n=5, **large) == (413, "body_too_large")
        sample = gateway.metrics.registry.get_sample_value
        with holding(gateway, headers["ann"], 1, n=4, **large) as of_ann:

            def only_anns_are_held():
                return 3_600_000 < sample("neap_gateway_body_bytes") < 3_700_000

            wait_until(only_anns_are_held)
            assert status_and_code(gateway, headers["ann"], **large) == (429, "client_limit")
            assert status_and_code(gateway, headers["bob"], **large) == (200, None)
            wait_until(only_anns_are_held)  # his answer may arrive before his bytes are given back
            go_on.set()
        assert of_ann[0].result() == (200, None)
        wait_until(lambda: sample("neap_gateway_body_bytes") == 0)


def test_a_body_that_arrives_does_not_end_the_same_clients_answer(secure, go_on):
    worker, headers = secure
    worker.worker.script = lambda request: [started(), until(go_on), chunk("a" * 1000), finished()]
    content = {"messages": [{"role": "user", "content": "x" * 900_000}]}
    with (
        gateway_to(worker.target, body_budget_mb=8, max_body_mb=1) as gateway,
        holding(gateway, headers["ann"], 1, n=4, **content) as of_ann,
        connected(gateway) as connection,
    ):
        num_bytes = partial(gateway.metrics.registry.get_sample_value, "neap_gateway_body_bytes")
        wait_until(lambda: 3_600_000 < num_bytes() < 3_700_000)
        limit = (4 << 20) - 100  # bytes, of which the answer has a thousand
        connection.sendall(head(1_000_000, headers["ann"]) + b" " * (limit - int(num_bytes())))
        wait_until(lambda: num_bytes() == limit)
        go_on.set()
        assert of_ann[0].result() == (200, None)


def scored_chunk(num_tokens):
    """A chunk whose tokens have twenty alternatives each."""
    others = [pb.Alternative(id=i, logprob=-i - 0.123456789, text=f"other {i}") for i in range(20)]
    token = pb.Token(id=1, logprob=-0.5, text="a", proposer="full", alternatives=others)
    return pb.GenerateResponse(chunk=pb.TokenChunk(text="a" * num_tokens, tokens=[token] * num_tokens))


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_an_answer_that_is_no_stream_counts_as_it_comes(secure, go_on, path):
    worker, headers = secure
    one, alone = scored_chunk(10), Collected()
    logprobs = chat_logprobs(one.chunk.tokens) if path == CHAT else text_logprobs(one.chunk.tokens, 0)[0]
    alone.add(one.chunk, logprobs)
    num_pieces = 0
    worker.worker.script = lambda request: answered(request, go_on, *[one] * num_pieces)

    def ask(name, **fields):
        content = {"prompt": "x", "logprobs": 20} if path != CHAT else chat_body(logprobs=True, top_logprobs=20)
        reply = gateway.http.post(path, json={"model": "tiny", **content, **fields}, headers=headers[name])
        return reply.status_code, reply.json()["error"]["code"] if reply.status_code != 200 else "[DONE]" in reply.text

    with gateway_to(worker.target, body_budget_mb=2, max_body_mb=1) as gateway, ThreadPoolExecutor(1) as pool:

        def used():
            return gateway.metrics.registry.get_sample_value("neap_gateway_body_bytes")

        num_pieces = int(0.6 * (1 << 20) / alone.num_bytes)
        of_ann = pool.submit(ask, "ann", model="held")
        try:
            wait_until(lambda: used() > num_pieces * alone.num_bytes)
            assert ask("ann") == (429, "client_limit")
            assert ask("ann", stream=True) == (200, True)
            assert ask("bob") == (200, False)
        finally:
            go_on.set()
        assert of_ann.result() == (200, False)
        wait_until(lambda: used() == 0)  # a moment after the client has all of it
        num_pieces *= 2
        assert ask("ann") == (400, "answer_too_large")
        assert ask("ann", stream=True) == (200, True)
        wait_until(lambda: used() == 0)  # a moment after the client has all of it


def test_what_is_kept_of_an_answer_is_counted():
    tracemalloc.start()
    try:
        kept = Collected()
        before, _ = tracemalloc.get_traced_memory()
        for i in range(200):
            event = scored_chunk(8)
            event.chunk.reasoning = f"a thought {i}"
            call = "" if i % 50 else f"id{i}"
            event.chunk.tool_calls.add(id=call, name=call, arguments=f'{{"{i}":')
            kept.add(event.chunk, chat_logprobs(event.chunk.tokens))
            del event
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.9 < kept.num_bytes / taken < 1.1
    message = kept.message()
    assert len(message["tool_calls"]) == 4
    assert message["reasoning_content"].endswith("a thought 199")
    assert len(json.loads(kept.logprobs())["content"]) == len(message["content"]) == 1600


def test_clients_without_tokens_are_told_apart_by_address(go_on):
    """A token that nobody asks for tells no client apart, because anybody can make up another."""
    other = {"authorization": "Bearer two"}
    with (
        scripted_worker(lambda request: answered(request, go_on, chunk("a"))) as worker,
        gateway_to(worker.target, max_requests=4) as gateway,
        holding(gateway, {"authorization": "Bearer one"}, 2),
    ):
        assert status_and_code(gateway, other) == (429, "client_limit")
        with connected(gateway, "127.0.0.2") as connection:
            body = json.dumps(chat_body(model="held")).encode()
            connection.sendall(head(len(body), other) + body)
            wait_until(lambda: gateway.gateway.num_running == 3)
            go_on.set()
            assert connection.recv(100).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("address", "key"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("/run/socket", "/run/socket"),
    ],
)
def test_addresses_of_one_host_are_one_client(address, key):
    assert address_key(address) == key


def test_a_peer_has_a_share_of_the_connections(monkeypatch):
    monkeypatch.setattr(addresses, "MAX_CONNECTIONS", 8)
    with gateway_to("127.0.0.1:1") as gateway, ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(connected(gateway, "127.0.0.2"))
        with connected(gateway, "127.0.0.2") as more:
            answer = more.makefile("rb").read()
            assert answer.startswith(b"HTTP/1.1 429 ")
            assert b"client_limit" in answer
        assert gateway.http.get("/healthz").status_code == 200
        stack.close()
        wait_until(lambda: gateway.server.num_connections == 1)
        with connected(gateway, "127.0.0.2") as again:
            again.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
            assert again.recv(100).startswith(b"HTTP/1.1 200 ")


def test_large_bodies_are_parsed_beside_the_loop_and_clients_take_turns(secure, monkeypatch):
    worker, headers = secure
    parse, order, may_parse = app.parse_generation, [], threading.Event()

    def slow(body, **options):
        order.append(json.loads(body)["user"])
        assert may_parse.wait(60)
        return parse(body, **options)

    monkeypatch.setattr(app, "parse_generation", slow)
    large = {"messages": [{"role": "user", "content": "x" * body_module.INLINE_BYTES}]}
    with gateway_to(worker.target) as gateway, ThreadPoolExecutor(5) as pool:
        asked = []

        def ask(name):
            running = gateway.gateway.num_running
            asked.append(pool.submit(status_and_code, gateway, headers[name], user=name, **large))
            wait_until(lambda: gateway.gateway.num_running == running + 1)

        for name in ("ann", "ann", "ann", "bob"):
            ask(name)
        assert gateway.http.get("/healthz").status_code == 200
        may_parse.set()
        assert [one.result() for one in asked] == [(200, None)] * 4
    assert order == ["ann", "bob", "ann", "ann"]


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 7, 1000])
def test_values_are_counted_outside_of_strings_wherever_a_chunk_ends(monkeypatch, chunk_bytes):
    fields = {'[,"\\': ["{[,\\\\", "\\", '"', {"a": [1, 2, "é,"]}], "b\\": {}, "c": '\\"[,'}
    body = json.dumps(fields).encode()
    chunks = [body[at : at + chunk_bytes] for at in range(0, len(body), chunk_bytes)]

    for limit, num in (("MAX_CONTAINERS", 5), ("MAX_VALUES", 7)):
        for most, is_refused in ((num, False), (num - 1, True)):
            monkeypatch.setattr(body_module, limit, most)
            counter = body_module.Structure()
            try:
                for part in chunks:
                    counter.add(part)
                refused = False
            except body_module.InvalidInput as error:
                refused = error.reason == "BODY_TOO_LARGE"
            assert refused == is_refused
        monkeypatch.setattr(body_module, limit, 1000)


def test_a_body_of_too_many_values_is_refused(secure):
    """At once, although its last bytes are the reason: nothing more comes that could be waited for."""
    worker, headers = secure
    with gateway_to(worker.target, request_timeout_s=600) as gateway:
        messages = [{"role": "user", "content": "x"}] * body_module.MAX_CONTAINERS
        reply = status_and_code(gateway, headers["ann"], messages=messages)
        assert reply == (413, "body_too_large")


def test_the_workers_are_told_which_client_asks_where_they_cannot_know(scripted, secure, go_on):
    worker, gateway = scripted
    body = json.dumps(chat_body()).encode()
    with connected(gateway, "127.0.0.2") as connection:
        connection.sendall(head(len(body), {"x-neap-client": "another"}) + body)
        assert connection.makefile("rb").readline().split()[1] == b"200"
    assert worker.metadata[-1]["x-neap-client"] == "127.0.0.2"
    go_on.set()
    known, headers = secure
    with gateway_to(known.target) as gateway:
        assert status_and_code(gateway, headers["ann"]) == (200, None)
    assert "x-neap-client" not in known.worker.metadata[-1]
