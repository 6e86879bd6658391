"""The examples in docs/examples, each against a real worker with a tiny model. tests/protos/test_distribution.py runs
those in Python, too, in an environment that has the client alone.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest
from google.protobuf.descriptor_pb2 import FileOptions
from neap_client import NeapClient, generate_request
from neap_client.inference.v1 import inference_pb2_grpc

from shared.model.loaded import wrap_model
from shared.registry.factory import open_registry
from tests.chat_gateways import chat_gateway
from tests.chats import HERMES
from tests.fixed_costs import fixed_cost_engine
from tests.gateways import gateway_to
from tests.generation import publish
from tests.worker import build_model, build_tokenizer, serving

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "docs" / "examples"
# Debian's packages golang-google-grpc-dev and golang-github-golang-protobuf-1-5-dev put the libraries of Go here. The
# tools are in golang-go, protoc-gen-go-1-5 and protoc-gen-go-grpc.
GO_LIBRARIES = Path("/usr/share/gocode")
# Started, and the tokens of a call that is broken off.
NUM_TOKENS = 6
GO_TOOLS = ("go", "protoc-gen-go", "protoc-gen-go-grpc")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    loaded = wrap_model(build_model(), build_tokenizer(), model_id="tiny")
    registry = open_registry(str(tmp_path_factory.mktemp("registry")))
    with fixed_cost_engine(loaded) as engine:
        publish(registry, engine)
        with serving(engine, registry) as worker:
            yield worker.target
    registry.close()


class Interrupting(inference_pb2_grpc.InferenceServiceServicer):
    """Hands calls on, and breaks off each answer after a few more tokens, however many of them come at once."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self.num_resumed = 0

    def Generate(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        self.num_resumed += bool(request.resume.token_ids)
        wanted = request.stopping.max_tokens
        request.stopping.max_tokens = min(wanted, len(request.resume.token_ids) + NUM_TOKENS)
        for event in self._stub.Generate(request):
            if event.HasField("finished") and request.stopping.max_tokens < wanted:
                context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
            yield event


@pytest.fixture
def interrupting(target: str) -> Iterator[tuple[str, Interrupting]]:
    with grpc.insecure_channel(target) as channel, ThreadPoolExecutor(2) as pool:
        servicer = Interrupting(inference_pb2_grpc.InferenceServiceStub(channel))
        server = grpc.server(pool)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}", servicer
        server.stop(None).wait()


@pytest.fixture(scope="module")
def answer(target: str) -> str:
    """What every example prints for the prompt "hello"."""
    request = generate_request("tiny", "hello", max_tokens=32)
    with NeapClient(target) as client, client.generate(request) as stream:
        assert list(stream)
        return stream.text


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        check=False,
        capture_output=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode()


@pytest.mark.parametrize("name", ["generate.py", "generate_async.py"])
def test_python(name, target, answer, tmp_path):
    path = os.pathsep.join([str(ROOT / "protos"), os.environ.get("PYTHONPATH", "")])
    program = EXAMPLES / "python" / name
    arguments = (target, "tiny", "hello")
    assert run(sys.executable, program, *arguments, cwd=tmp_path, PYTHONPATH=path) == f"{answer}\n"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl(target, answer, tmp_path):
    with gateway_to(target) as gateway:
        printed = run("bash", EXAMPLES / "curl.sh", gateway.url, "tiny", "hello", cwd=tmp_path)
    assert printed.startswith("data: {")
    assert printed.rstrip().endswith("data: [DONE]")


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_node_without_packages(tmp_path):
    stay = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    with chat_gateway(HERMES, tmp_path) as gateway:
        for seed in range(4):
            fields = json.dumps({"max_tokens": 300, "logit_bias": gateway.bias, "seed": seed})
            command = ("node", EXAMPLES / "node" / "fetch.mjs", gateway.url, "tiny", "hello")
            answer, ended, call = run(*command, "unused", fields, cwd=tmp_path).splitlines()
            jsonschema.validate(json.loads(answer.removeprefix("answer ")), stay)
            assert ended == "ended tool_calls"
            jsonschema.validate(json.loads(call.removeprefix("call book ")), stay)


@pytest.mark.parametrize("name", ["node/node_modules/x", "node/package-lock.json", "go/gen/x"])
def test_what_the_tools_leave_is_ignored(name):
    run("git", "check-ignore", EXAMPLES / name, cwd=ROOT)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("npm") is None, reason="needs node and npm")
def test_node(target, answer, interrupting, tmp_path):
    for name in ("package.json", "generate.mjs", "openai.mjs"):
        shutil.copy(EXAMPLES / "node" / name, tmp_path / name)
    run("npm", "install", "--no-audit", "--no-fund", "--silent", cwd=tmp_path)
    for address in (target, interrupting[0]):
        command = ("node", "generate.mjs", address, "tiny", "hello", ROOT / "protos")
        assert run(*command, cwd=tmp_path) == f"{answer}\n"
    assert interrupting[1].num_resumed > 2
    with gateway_to(target) as gateway:
        printed = run("node", "openai.mjs", gateway.url, "tiny", "hello", cwd=tmp_path)
    assert printed == f"{answer}\n"


@pytest.mark.full
@pytest.mark.skipif(
    not all(map(shutil.which, GO_TOOLS)) or not (GO_LIBRARIES / "src").is_dir(),
    reason=f"needs {', '.join(GO_TOOLS)} and Go's libraries of gRPC in {GO_LIBRARIES}",
)
def test_go(target, answer, interrupting, tmp_path):
    folder = tmp_path / "src" / "neap-example"
    shutil.copytree(EXAMPLES / "go", folder)
    buf = shutil.which("buf", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    run(buf, "generate", "--template", ROOT / "buf.gen.yaml", ROOT, cwd=folder)
    run(
        *("go", "build", "-o", "example", "."),
        cwd=folder,
        GO111MODULE="off",
        GOPATH=f"{tmp_path}{os.pathsep}{GO_LIBRARIES}",
        GOCACHE=str(tmp_path / "cache"),
    )
    for address in (target, interrupting[0]):
        assert run("./example", address, "tiny", "hello", cwd=folder) == f"{answer}\n"
    assert interrupting[1].num_resumed > 2


def test_files_have_options_for_java():
    for name in ("calibration", "inference", "router"):
        file = import_module(f"neap_client.{name}.v1.{name}_pb2").DESCRIPTOR
        options = FileOptions.FromString(file.GetOptions().SerializeToString())
        assert (options.java_package, options.java_multiple_files) == (f"neap.{name}.v1", True)
