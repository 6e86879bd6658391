"""The light distribution: its wheel, installed alone, streams from a worker."""

import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from shared.engine.engine import Engine
from shared.model.loaded import wrap_model
from shared.registry.factory import open_registry
from tests.generation import publish
from tests.worker import build_model, build_tokenizer, serving

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs/examples/python"
CLIENT = tomllib.loads((ROOT / "protos/pyproject.toml").read_text())["project"]
GENERATED = ("*_pb2*", "client.py", "sync_generation.py")
SERVER = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TYPED = """
from neap_client import AsyncNeapClient, ChatMessage, ClientSecurity, NeapClient, generate_request
from neap_client.errors import Exhausted

def answer(client: NeapClient) -> str:
    with client.generate(generate_request("m", "p", policy="full")) as stream:
        for event in stream:
            print(event.chunk.text)
        return stream.text

async def whole(client: AsyncNeapClient) -> str:
    request = generate_request("m", [ChatMessage(role="user", content="p")])
    return (await client.answer(request)).finish_reason

async def models(client: AsyncNeapClient) -> list[str]:
    return [model.model_id for model in await client.list_models()]

def delay(error: Exhausted) -> float | None:
    return error.retry_after_s
"""
MISTYPED = 'from neap_client import NeapClient\n\nNeapClient("x", timeout=3).get_model(7)\n'


def test_the_server_needs_the_client_of_its_own_version():
    needed = {Requirement(line).name: Requirement(line) for line in SERVER["dependencies"]}
    assert CLIENT["version"] == SERVER["version"]
    assert str(needed["neap-client"].specifier) == f"=={CLIENT['version']}"
    # What the server pins, the client allows.
    for line in CLIENT["dependencies"]:
        light = Requirement(line)
        (pinned, *_) = needed[light.name].specifier
        assert light.specifier.contains(pinned.version), line


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of protos/ that has nothing generated in it."""
    folder = tmp_path_factory.mktemp("client") / "protos"
    shutil.copytree(ROOT / "protos", folder, ignore=shutil.ignore_patterns(*GENERATED, "__pycache__", "dist"))
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (wheel,) = (folder / "dist").glob("neap_client-*-py3-none-any.whl")
    return wheel


@pytest.mark.full
def test_the_wheel_contains_one_package_and_its_license(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"neap_client"}
    info = f"neap_client-{CLIENT['version']}.dist-info"
    assert {
        "neap_client/py.typed",
        "neap_client/inference/v1/inference_pb2.pyi",
        "neap_client/router/v1/router_pb2_grpc.py",
        "neap_client/client.py",
        "neap_client/sync_generation.py",
        f"{info}/licenses/LICENSE",
    } <= set(names)
    assert not [name for name in names if name.endswith((".proto", "hatch_build.py"))]


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment in which only the wheel has been installed."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "--quiet", "install", str(wheel)]
    subprocess.run(pip, check=True, env={"PATH": "/usr/bin:/bin"})
    return python


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_wheel_alone_streams_from_a_worker(python, tmp_path):
    def run(*arguments: str) -> str:
        command = [str(python), "-P", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env={}, check=True, capture_output=True, text=True, timeout=300
        ).stdout

    installed = {
        canonicalize_name(line.partition("==")[0])
        for line in run("-m", "pip", "list", "--format", "freeze").splitlines()
    }
    asked = {Requirement(line).name for line in CLIENT["dependencies"]}
    # Each of them needs nothing else but typing-extensions.
    assert installed - {"pip", "setuptools"} == {"neap-client", *asked, "typing-extensions"}

    loaded = wrap_model(build_model(), build_tokenizer(), model_id="tiny")
    registry = open_registry(str(tmp_path / "registry"))
    with Engine(loaded) as engine, serving(engine, registry) as worker:
        publish(registry, engine)
        one = run(str(EXAMPLES / "generate.py"), worker.target, "tiny", "hello")
        two = run(str(EXAMPLES / "generate_async.py"), worker.target, "tiny", "hello", "hello")
        refused = run(str(EXAMPLES / "generate_async.py"), worker.target, "other", "hello")
    registry.close()
    assert one.strip()
    assert two == one + one
    assert "[MODEL_NOT_FOUND: " in refused


@pytest.mark.full
def test_its_types_are_seen_by_strict_checks(python, tmp_path):
    def check(source: str) -> str:
        (tmp_path / "program.py").write_text(source)
        options = ["--strict", "--python-executable", str(python), "--config-file", ""]
        return subprocess.run(
            [sys.executable, "-P", "-m", "mypy", *options, "program.py"],
            cwd=tmp_path,
            env={},
            check=False,
            capture_output=True,
            text=True,
        ).stdout

    assert check(TYPED).startswith("Success"), check(TYPED)
    found = check(MISTYPED)
    assert '"timeout"' in found
    assert 'incompatible type "int"' in found
