"""Real clients of OpenAI's API before a gateway, each in its newest version in an environment of its own. The programs
are in tests/e2e/clients; what each one does is in its first line."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chat_gateways import chat_gateway
from tests.chats import HERMES
from tests.worker import EOS, build_tokenizer

pytestmark = [pytest.mark.full, pytest.mark.e2e, pytest.mark.timeout(1200)]

PROGRAMS = Path(__file__).with_name("clients")
PYTHON = {
    "openai_sdk": ["openai"],
    "openai_agents": ["openai-agents"],
    "langchain_sdk": ["langchain", "langchain-openai"],
    "llama_index_sdk": ["llama-index-llms-openai-like"],
    "pydantic_ai_sdk": ["pydantic-ai-slim[openai]"],
    "instructor_sdk": ["instructor"],
    "litellm_sdk": ["litellm"],
    "lm_eval_harness": ["lm_eval[api]"],
    "aiperf_load": ["aiperf"],
}
NODE = ["openai", "ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod"]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The arguments of a program: the gateway's URL, and fields of a body that make a random model end. It says "hello"
    until the penalty lets it stop, which is never its first token, and writes no property that need not be there."""
    hello, closing = build_tokenizer().convert_tokens_to_ids(["hello", "}"])
    bias = {str(hello): 60, str(EOS): 45, str(closing): 40}
    with chat_gateway(HERMES, tmp_path_factory.mktemp("registry")) as gateway:
        yield [gateway.url, json.dumps({"logit_bias": bias, "frequency_penalty": 2})]


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], cwd=cwd, check=False, capture_output=True, text=True)


def installed(*command: str | Path, cwd: Path) -> None:
    result = run(*command, cwd=cwd)
    if result.returncode:
        pytest.skip(f"does not install here: {(result.stderr or result.stdout).strip().splitlines()[-1:]}")


def environment(folder: Path, packages: list[str]) -> Path:
    """The interpreter of a new environment with these packages."""
    run(sys.executable, "-m", "venv", "--without-pip", "env", cwd=folder).check_returncode()
    python = folder / "env" / "bin" / "python"
    installed(sys.executable, "-m", "uv", "pip", "install", "-q", "--python", python, *packages, cwd=folder)
    return python


@pytest.mark.parametrize("name", PYTHON)
def test_python(name, given, tmp_path):
    python = environment(tmp_path, PYTHON[name])
    result = run(python, PROGRAMS / f"{name}.py", *given, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs node and npm")
def test_node(given, tmp_path):
    installed("npm", "install", "--no-audit", "--no-fund", "--silent", *NODE, cwd=tmp_path)
    program = shutil.copy(PROGRAMS / "node_sdks.mjs", tmp_path)
    result = run("node", program, *given, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_each_program_runs():
    assert {path.stem for path in PROGRAMS.glob("*.py")} == PYTHON.keys()
