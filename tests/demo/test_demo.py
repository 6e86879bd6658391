"""The demo with a tiny random model, as real processes: what `make demo` does, without the download."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

pytestmark = [pytest.mark.e2e, pytest.mark.full]
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
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def command(model_folder: Path, data_dir: Path) -> list[str]:
    arguments = [sys.executable, "-m", "demo", "--data-dir", str(data_dir)]
    arguments += ["--model-path", str(model_folder), "--max-tokens", "12"]
    return [*arguments, "--calibration-budget", "20"]


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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.timeout(400)
def test_demo_runs_reuses_and_leaves_nothing(model_folder: Path, tmp_path: Path):
    data_dir = tmp_path / "data"
    outputs = []
    for _ in range(2):
        result = subprocess.run(
            command(model_folder, data_dir),
            env=environment(),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=180,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        outputs.append(result.stdout)
        assert processes_naming(str(data_dir)) == []
    for version in (1, 2):
        assert f"published version {version}" in outputs[0]
        assert f"reusing version {version}" in outputs[1]
    for output in outputs:
        assert "neap ships no router for this model" in output
        assert "guessed right, of " in output
        rows = [line for line in output.splitlines() if line.startswith("│ exact")]
        assert [row.split()[1:3] for row in rows][1:] == [["exact", "before"], ["exact", "after"]]
        assert all(row.rstrip("│ ").endswith("yes") for row in rows)
    assert (data_dir / "demo-report.png").stat().st_size > 10_000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("place", ["worker serves on", "calibration "])
def test_an_interrupted_demo_leaves_nothing(model_folder: Path, tmp_path: Path, number: int, place: str):
    data_dir = tmp_path / "data"
    with subprocess.Popen(
        command(model_folder, data_dir), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as demo:
        assert demo.stdout is not None
        lines = []
        for line in demo.stdout:
            lines.append(line)
            if place in line:
                break
        assert any(place in line for line in lines), "".join(lines)
        demo.send_signal(number)
        rest, _ = demo.communicate(timeout=60)
    assert demo.returncode == 130, "".join(lines) + rest
    assert "Traceback" not in rest
    assert processes_naming(str(data_dir)) == []
