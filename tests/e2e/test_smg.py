"""The gateway SMG, from PyPI in an environment of its own, before two workers that serve vLLM's dialect: answers are
those of neap's own gateway before the same workers."""

import json
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch

from tests.chats import HERMES, build_chat_model
from tests.constrained import VOCABULARY_SIZE
from tests.e2e.test_gateway_process import gateway_process
from tests.e2e.test_sdks import environment
from tests.exported_metrics import scraped
from tests.servers import free_ports
from tests.waiting import wait_until
from tests.worker import build_model
from tests.worker_process import worker_process

pytestmark = [pytest.mark.full, pytest.mark.e2e, pytest.mark.timeout(1200)]
CHAT = "/v1/chat/completions"
DIALECT = ("--vllm-dialect", "--metrics-listen", "127.0.0.1:0", "--grace-s", "5")


@pytest.fixture(scope="module")
def smg(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The gateway's program."""
    return environment(tmp_path_factory.mktemp("smg"), ["smg>=1.13"]).with_name("smg")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with tools that writes what is printed in ASCII: half a character has no text that two gateways agree
    on."""
    tokenizer, model = build_chat_model(HERMES, own_tokens=True).tokenizer, build_model(0, VOCABULARY_SIZE)
    head = model.get_output_embeddings().weight
    texts = [tokenizer.decode([i]) for i in range(VOCABULARY_SIZE)]
    silent = [i for i, text in enumerate(texts) if not text or not (text.isascii() and text.isprintable())]
    with torch.no_grad():
        head[silent + tokenizer.all_special_ids] = 0
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def gateway(program: Path, *targets: str) -> Iterator[httpx.Client]:
    """SMG before workers, once it has their model."""
    ports = free_ports(2)
    urls = [f"grpc://{target}" for target in targets]
    checks = ("--health-check-interval-secs", "1", "--health-failure-threshold", "1", "--policy", "round_robin")
    command = [program, "launch", "--host", "127.0.0.1", "--port", str(ports[0]), "--prometheus-port", str(ports[1])]
    process = subprocess.Popen(
        [*command, *checks, "--worker-urls", *urls], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{ports[0]}", timeout=120) as http:
            wait_until(lambda: ready(http) == len(targets), timeout_s=120)
            wait_until(lambda: http.post(CHAT, json=body(max_tokens=1)).status_code == 200, timeout_s=120)
            yield http
    finally:
        process.kill()
        process.wait(60)


def ready(http: httpx.Client) -> int:
    """How many workers it may ask."""
    try:
        return sum(worker["is_healthy"] for worker in http.get("/workers").json()["workers"])
    except (httpx.TransportError, ValueError):
        return 0


@pytest.fixture(scope="module")
def pair(smg: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """SMG as `smg`, our own gateway as `own`, and two workers: their processes, addresses and logs. The last test kills
    one of them."""
    tmp_path = tmp_path_factory.mktemp("pair")
    with ExitStack() as stack:
        found = SimpleNamespace(workers=[], add=lambda: add(stack, folder, tmp_path, found))
        for _ in range(2):
            found.add()
        found.smg = stack.enter_context(gateway(smg, *(worker.address for worker in found.workers)))
        _, url = stack.enter_context(gateway_process(found.workers[0].address))
        found.own = stack.enter_context(httpx.Client(base_url=url, timeout=120))
        yield found


def add(stack: ExitStack, folder: Path, tmp_path: Path, found: SimpleNamespace) -> SimpleNamespace:
    log = tmp_path / f"log-{len(found.workers)}"
    stderr = stack.enter_context(log.open("wb"))
    worker = worker_process(folder, tmp_path / "registry", *DIALECT, stderr=stderr, is_forked=True)
    process, address = stack.enter_context(worker)
    found.workers.append(one := SimpleNamespace(process=process, address=address, log=log))
    wait_until(lambda: b'"serving"' in log.read_bytes(), timeout_s=120)
    return one


def body(text: str = "hello", **more: object) -> dict[str, object]:
    messages = [{"role": "user", "content": text}]
    return {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 24, **more}


def text_of(answer: httpx.Response) -> list[tuple[str, str]]:
    assert answer.status_code == 200, answer.text
    # SMG numbers choices in the order in which they end.
    return sorted((choice["message"]["content"], choice["finish_reason"]) for choice in answer.json()["choices"])


def parts(lines: Iterator[str]) -> Iterator[dict[str, object]]:
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def num_active(worker: SimpleNamespace) -> float:
    found = scraped(worker.log)
    return found["neap_num_requests_running", "tiny"] + found["neap_num_requests_waiting", "tiny"]


def num_cancelled(worker: SimpleNamespace) -> float:
    return scraped(worker.log).get(("neap_request_failures_total", "tiny", "CANCELLED"), 0)


SAMPLED = {"temperature": 0.8, "top_k": 5, "seed": 7}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["red", "blue"]}}}


def test_answers_are_those_of_our_own_gateway(pair):
    asked = [
        body(),
        body("another question", **SAMPLED),
        body(n=2, **SAMPLED),
        body(frequency_penalty=0.5, presence_penalty=0.25),
        body(response_format=SCHEMA),
        body(stop=[text_of(pair.own.post(CHAT, json=body()))[0][0][5]]),
    ]
    for one in asked:
        own = text_of(pair.own.post(CHAT, json=one))
        for _ in pair.workers:  # each in turn
            assert text_of(pair.smg.post(CHAT, json=one)) == own
        with pair.smg.stream("POST", CHAT, json={**one, "stream": True}) as stream:
            choices = [choice for part in parts(stream.iter_lines()) for choice in part["choices"]]
        texts = [
            "".join(choice["delta"].get("content") or "" for choice in choices if choice["index"] == index)
            for index in range(len(own))
        ]
        assert texts == [text for text, _ in own]
    assert all(scraped(worker.log)["neap_generation_tokens_total", "tiny"] > 0 for worker in pair.workers)
    for wrong in (
        body("x" * 4000),
        body(response_format={**SCHEMA, "json_schema": {"name": "a", "schema": {"type": 7}}}),
    ):
        assert pair.smg.post(CHAT, json=wrong).status_code == pair.own.post(CHAT, json=wrong).status_code == 400


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_calls_of_tools(pair, choice):
    one = body(tools=[TOOL], tool_choice=choice, max_tokens=200)
    for http in (pair.smg, pair.own):
        calls = http.post(CHAT, json=one).json()["choices"][0]["message"]["tool_calls"]
        assert {(call["function"]["name"], call["function"]["arguments"].replace(" ", "")) for call in calls} == {
            ("weather", '{"city":"Paris"}')
        }


def test_a_client_that_goes_ends_its_request(pair):
    before = sum(map(num_cancelled, pair.workers))
    with pair.smg.stream("POST", CHAT, json=body(stream=True, max_tokens=1800, n=8, **SAMPLED)) as stream:
        next(parts(stream.iter_lines()))
    wait_until(lambda: sum(map(num_cancelled, pair.workers)) == before + 8)
    assert sum(map(num_active, pair.workers)) == 0


def test_workers_are_killed_added_and_drained(pair):
    own = text_of(pair.own.post(CHAT, json=body()))
    pair.workers[1].process.kill()
    for _ in range(4):  # whoever was lost is asked again elsewhere
        assert text_of(pair.smg.post(CHAT, json=body())) == own
    wait_until(lambda: ready(pair.smg) == 1, timeout_s=60)
    third = pair.add()
    pair.smg.post("/workers", json={"url": f"grpc://{third.address}"}).raise_for_status()
    wait_until(lambda: ready(pair.smg) == 2, timeout_s=60)
    with ThreadPoolExecutor() as pool:
        long = [pool.submit(pair.smg.post, CHAT, json=body(max_tokens=600)) for _ in range(4)]
        wait_until(lambda: num_active(third) > 0)
        third.process.send_signal(signal.SIGTERM)
        wait_until(lambda: ready(pair.smg) == 1, timeout_s=60)
        assert [text_of(pair.smg.post(CHAT, json=body())) for _ in range(4)] == [own] * 4
        expected = text_of(pair.own.post(CHAT, json=body(max_tokens=600)))
        assert [text_of(answer.result(120)) for answer in long] == [expected] * 4
    assert third.process.wait(60) == 0
