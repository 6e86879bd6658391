"""Loading a .gguf file: the model is that of the file, matrices stay in their blocks, the file is parsed once, the log
has its lines."""

from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import structlog
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers import modeling_gguf_pytorch_utils as checkpoints

from shared.errors import Corrupt
from shared.model.load import load_model
from shared.model.loaded import LoadedModel
from shared.model.weights import gguf as module
from shared.model.weights.lazy import lazy
from shared.model.weights.stored import Blocks
from tests.gguf_files import write_llama
from tests.tiers import tiered

SMALL = [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.F16, Kind.BF16, Kind.F32]
LARGE = {"attn_q": Kind.Q4_K, "attn_k": Kind.Q5_K, "ffn_up": Kind.Q6_K, "ffn_down": Kind.Q4_K}
# The types of a common Q4_K_M file, and plain ones.
MIXED = {
    "token_embd": Kind.Q6_K,
    "attn_q": Kind.Q4_K,
    "attn_k": Kind.Q4_K,
    "attn_v": Kind.Q6_K,
    "attn_output": Kind.F16,
    "ffn_gate": Kind.Q4_K,
    "ffn_up": Kind.F32,
    "ffn_down": Kind.Q6_K,
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@torch.no_grad()
def _logits(loaded: LoadedModel) -> Tensor:
    return loaded.model(input_ids=torch.arange(9)[None]).logits


def _formats(loaded: LoadedModel) -> set[str]:
    return {stored.format for p in loaded.model.parameters() if (stored := lazy(p)) is not None}


def _replaced() -> tuple[object, ...]:
    return (
        gguf.GGUFReader,
        gguf.get_tensor_name_map,
        gguf.dequantize,
        checkpoints.load_gguf_checkpoint,
        checkpoints._gguf_parse_value,
    )


def test_is_parsed_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: Counter[str] = Counter()
    read, names = module.read_contents, gguf.TensorNameMap.__init__

    def count_read(*args: object) -> object:
        made["contents"] += 1
        return read(*args)

    def count_names(self: object, *args: object) -> None:
        made["names"] += 1
        names(self, *args)

    monkeypatch.setattr(module, "read_contents", count_read)
    monkeypatch.setattr(gguf.TensorNameMap, "__init__", count_names)
    before = _replaced()
    load_model(file)
    assert made == {"contents": 1, "names": 1}
    assert _replaced() == before


def test_a_matrix_in_blocks_is_read_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times: Counter[Blocks] = Counter()
    read = Blocks._blocks

    def count(matrix: Blocks, *how: Any) -> Tensor:
        times[matrix] += 1
        return read(matrix, *how)

    monkeypatch.setattr(Blocks, "_blocks", count)
    matrices = [p for p in load_model(file).model.parameters() if p.dim() == 2]
    assert len(times) == len(matrices)
    assert set(times.values()) == {1}


@pytest.mark.parametrize("tied", tiered([True, False], {True}))
@pytest.mark.parametrize(
    "kinds", tiered([*SMALL, LARGE, MIXED], [Kind.Q8_0, MIXED]), ids=lambda k: getattr(k, "name", "K")
)
def test_a_model_in_blocks_is_the_dequantised_model(tmp_path: Path, kinds: Kind | dict[str, Kind], tied: bool) -> None:
    size = {"width": 256, "inner": 256} if isinstance(kinds, dict) else {}
    path = write_llama(tmp_path / "tiny.gguf", kinds, tied=tied, **size)
    own = load_model(path, compute_dtype=torch.float32)
    dequantised = load_model(path, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    names = {kind.name for kind in kinds.values()} if isinstance(kinds, dict) else {kinds.name}
    plain = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
    assert _formats(own) >= {plain.get(name, name) for name in names}
    assert _formats(dequantised) == {"float32"}
    for name, parameter in theirs.named_parameters():
        assert torch.equal(own.model.get_parameter(name), parameter), name
    assert torch.equal(_logits(own), _logits(dequantised))
    assert own.fingerprint == dequantised.fingerprint


def test_a_format_without_a_kernel_is_dequantised_and_named(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf", {"attn_q": Kind.TQ1_0}, width=256, inner=256)
    with structlog.testing.capture_logs() as lines:
        loaded = load_model(path)
    (line,) = [line for line in lines if line["event"].startswith("matrices were dequantised")]
    assert line["reasons"] == {"no kernel reads TQ1_0": 2}
    assert line["first"] == "blk.0.attn_q.weight"
    assert _formats(loaded) == {"Q8_0"} | {"float32"}


@pytest.mark.parametrize(
    "change",
    [lambda w: w[:, ::-1], lambda w: w - 1, lambda w: w[:, np.arange(64)[::-1]], np.tanh],
    ids=["columns", "values", "column numbers", "floats"],
)
def test_a_processor_that_does_more_than_move_rows_gets_the_weights(
    file: Path, monkeypatch: pytest.MonkeyPatch, change: object
) -> None:
    class Processor(checkpoints.TensorProcessor):
        def process(self, weights: np.ndarray, name: str, **_: object) -> object:
            weights = change(weights) if "ffn_up" in name else weights
            return checkpoints.GGUFTensor(weights, name, {})

    monkeypatch.setitem(checkpoints.TENSOR_PROCESSORS, "llama", Processor)
    with structlog.testing.capture_logs() as lines:
        loaded = load_model(file, accelerate=False)
    (tensor,) = [t for t in gguf.GGUFReader(file).tensors if t.name == "blk.1.ffn_up.weight"]
    expected = change(gguf.dequantize(tensor.data, tensor.tensor_type))
    parameter = loaded.model.get_parameter("model.layers.1.mlp.up_proj.weight")
    np.testing.assert_array_equal(parameter.numpy(), expected)
    assert any(line["event"].startswith("matrices were dequantised") for line in lines)


@pytest.mark.parametrize(("asked", "given"), [(None, torch.bfloat16), (torch.float16, torch.float16)])
def test_other_devices_than_a_cpu_compute_in_bfloat16_unless_asked(
    file: Path, asked: torch.dtype | None, given: torch.dtype
) -> None:
    # "meta": a device that is everywhere.
    assert load_model(file, device="meta", dtype=asked).model.dtype == given


def test_the_tokenizer_is_that_of_the_file(file: Path) -> None:
    loaded = load_model(file)
    ids = loaded.tokenizer("hello")["input_ids"]
    assert ids[0] == 257
    assert loaded.tokenizer.decode(ids) == "hello"


def test_the_log_says_what_is_loaded_and_how_long_it_took(file: Path) -> None:
    with structlog.testing.capture_logs() as lines:
        loaded = load_model(file, model_id="tiny")
    told = [line for line in lines if line["event"] in ("loading model", "model loaded")]
    assert [line["event"] for line in told] == ["loading model", "model loaded"]
    assert all(line["model_id"] == "tiny" for line in told)
    assert told[0]["size_mb"] == round(file.stat().st_size / 1e6, 1)
    assert told[0]["source"] == str(file)
    assert told[1]["seconds"] >= 0
    assert told[1]["fingerprint"] == loaded.fingerprint


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.5, 0.9999])
def test_a_file_that_is_cut_is_refused(file: Path, tmp_path: Path, share: float) -> None:
    cut = tmp_path / "cut.gguf"
    data = file.read_bytes()
    cut.write_bytes(data[: int(len(data) * share)])
    before = _replaced()
    with pytest.raises(Corrupt) as caught:
        load_model(cut)
    assert caught.value.reason == "MODEL_FILE_CORRUPT"
    assert _replaced() == before
