"""The demo with a tiny random model, as real processes: what `make demo` does, without the download."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc"),
]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, a byte vocabulary, no chat template."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": 0, **{symbol: index + 1 for index, symbol in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def command(model_folder: Path, data_dir: Path, *flags: str) -> list[str]:
    arguments = [sys.executable, "-m", "demo", "--data-dir", str(data_dir), "--model-path", str(model_folder)]
    return [*arguments, "--max-tokens", "32", *flags]


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def processes_naming(text: str) -> list[int]:
    """Processes whose command line holds `text`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if text.encode() in line:
                found.append(int(entry.name))
    return found


class Demo(subprocess.Popen[str]):
    """The demo as a process. A context manager: it must have ended and left nothing when the block is left."""

    def __init__(self, model_folder: Path, data_dir: Path, *flags: str) -> None:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        super().__init__(command(model_folder, data_dir, *flags), env=environment(), text=True, **pipes)
        self.data_dir, self.said = data_dir, ""

    def until(self, place: str) -> None:
        """Reads on to a line with this text."""
        while place not in (line := self.stdout.readline()):
            assert line, self.said
            self.said += line
        self.said += line

    def end(self) -> str:
        """All that it has said."""
        try:
            self.said += self.communicate(timeout=400)[0]
        except subprocess.TimeoutExpired as error:
            pytest.fail(f"it goes on: {self.said}{(error.stdout or b'').decode()}")
        return self.said

    def __exit__(self, *exception: object) -> None:
        self.kill()
        super().__exit__(*exception)
        assert processes_naming(str(self.data_dir)) == []


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_whole_story_and_another_that_begins_anew_and_is_interrupted(model_folder: Path, tmp_path: Path):
    with Demo(model_folder, tmp_path, "--budget", "10", "--trial", "15") as demo:
        said = demo.end()
    assert demo.returncode == 0, said
    for text in ("router 1 was learned", "router 2 learned from", "comparisons with 1", "answers of exact were those"):
        assert text in said
    rows = [" ".join(line.split()[1:3]) for line in said.splitlines() if line.startswith("│")]
    assert rows[-3:] == ["no router", "router 1", "router 2"]
    assert (tmp_path / "demo" / "demo.svg").stat().st_size > 10_000
    said = interrupted(signal.SIGINT, "3. 20 requests", model_folder, tmp_path)
    assert "router 1 learned from" in said  # the demo's word; that of `neap up` may be a moment too late


@pytest.mark.full
@pytest.mark.parametrize(("number", "place"), [(signal.SIGINT, "1. day 0"), (signal.SIGTERM, "2. meanwhile")])
def test_an_interrupted_demo_leaves_nothing(model_folder: Path, tmp_path: Path, number: int, place: str):
    interrupted(number, place, model_folder, tmp_path)


def interrupted(number: int, place: str, model_folder: Path, tmp_path: Path) -> str:
    """All that a demo has said that gets the signal once it has said `place`."""
    with Demo(model_folder, tmp_path, "--budget", "10") as demo:
        demo.until(place)
        demo.send_signal(number)
        said = demo.end()
    assert demo.returncode == 130, said
    assert "Traceback" not in said
    return said


@pytest.mark.full
@pytest.mark.parametrize(
    ("module", "name"), [("inference_service", "worker"), ("calibrator_service", "calibrator"), ("up", "`neap up`")]
)
def test_a_part_that_is_killed_is_named(model_folder: Path, tmp_path: Path, module: str, name: str):
    with Demo(model_folder, tmp_path) as demo:
        demo.until("1. day 0")
        parts = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes_naming(str(tmp_path))}
        # A part's own helpers have the same command line.
        os.kill(min(pid for pid, line in parts.items() if f"\0{module}\0".encode() in line), signal.SIGKILL)
        said = demo.end()
    assert re.search(rf"error: .*{name}.* ended.*\[SYSTEM_ENDED\]", said), said
    assert demo.returncode == 1


def test_a_port_in_use_is_named(model_folder: Path, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with Demo(model_folder, tmp_path, "--gateway", address) as demo:
            said = demo.end()
    assert re.search(rf"error: .*cannot listen on {address}", said), said


def test_a_folder_of_somebody_else_is_left_alone(model_folder: Path, tmp_path: Path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "thesis.txt").touch()
    with Demo(model_folder, tmp_path) as demo:
        assert "--data-dir names another place" in demo.end()
    assert (tmp_path / "demo" / "thesis.txt").exists()
