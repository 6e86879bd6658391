"""Loading .safetensors files: matrices stay in the format of the checkpoint, no second copy is made, bad files are
refused."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import structlog
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedModel

from shared.errors import Corrupt, NeapError, NotFound, Unavailable, UnsupportedModel
from shared.model.load import load_model
from shared.model.loaded import LoadedModel
from shared.model.substitution.match import Unsuitable
from shared.model.weights.files import StableFile
from shared.model.weights.lazy import lazy
from shared.model.weights.reading import SafetensorsReader
from tests.families import build_family
from tests.gguf_files import write_llama
from tests.reasons import raises

# Families without a kernel for everything keep those weights as float32.
SAVED = ["llama", "llama-tied", "qwen2.5", "qwen3", "gemma3-sliding", "phi3", "gpt2", "mixtral", "opt"]


@pytest.fixture(autouse=True)
def _no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.model.load.AutoTokenizer.from_pretrained", lambda **_: None)
    monkeypatch.setattr("shared.model.weights.gguf.split_as_the_file_says", lambda *_: None)


def save(folder: Path, family: str, dtype: torch.dtype) -> Path:
    build_family(family).to(dtype).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"), "llama", torch.bfloat16)


@torch.no_grad()
def _logits(loaded: LoadedModel) -> Tensor:
    return loaded.model(input_ids=torch.arange(9)[None]).logits


def _formats(loaded: LoadedModel) -> set[str]:
    return {stored.format for p in loaded.model.parameters() if (stored := lazy(p)) is not None}


@pytest.mark.parametrize("family", SAVED)
def test_a_bfloat16_checkpoint_computes_the_bits_of_its_float32_build(tmp_path: Path, family: str) -> None:
    folder = save(tmp_path, family, torch.bfloat16)
    own, dequantised = load_model(folder), load_model(folder, dtype=torch.float32)
    assert _formats(own) == {"bfloat16"}
    assert _formats(dequantised) == {"float32"}
    assert own.model.dtype == torch.float32
    assert torch.equal(_logits(own), _logits(dequantised))
    assert own.fingerprint == dequantised.fingerprint


def test_float16_is_kept_and_asked_for(tmp_path: Path, folder: Path) -> None:
    half = load_model(save(tmp_path, "llama", torch.float16))
    assert _formats(half) == {"float16"}
    rounded = load_model(folder, dtype=torch.float16)
    assert _formats(rounded) == {"float16"}
    expected = load_model(folder, accelerate=False).model.state_dict()
    for name, weight in rounded.model.state_dict().items():
        wanted = expected[name].half().float() if weight.dim() == 2 else expected[name]
        assert torch.equal(weight, wanted)


def test_a_weight_that_float16_cannot_hold_is_refused(tmp_path: Path) -> None:
    model = build_family("llama")
    model.lm_head.weight.data[3, 5] = 1e5
    model.save_pretrained(tmp_path)
    with raises(UnsupportedModel, "WEIGHTS_OVERFLOW"):
        load_model(tmp_path, dtype=torch.float16)


def test_no_matrix_is_read_before_it_is_packed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While transformers builds the model, no matrix is in memory. Afterwards none is left in its file."""
    given: list[str] = []
    get_tensor = SafetensorsReader.get_tensor

    def note(reader: SafetensorsReader, name: str) -> Tensor:
        tensor = get_tensor(reader, name)
        if tensor.dim() == 2 and lazy(tensor) is None:
            given.append(name)
        return tensor

    monkeypatch.setattr(SafetensorsReader, "get_tensor", note)
    loaded = load_model(folder)
    assert given == []
    matrices = [p for p in loaded.model.parameters() if p.dim() == 2]
    assert matrices
    assert all(lazy(p).memory for p in matrices)


def test_other_threads_load_as_ever_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads load the same files at once: one with neap, the other with transformers alone."""
    file = write_llama(tmp_path / "tiny.gguf")
    folder = save(tmp_path / "plain", "llama", torch.bfloat16)
    places = (
        {"pretrained_model_name_or_path": folder},
        {"pretrained_model_name_or_path": tmp_path, "gguf_file": file.name},
    )
    beside: list[PreTrainedModel] = []

    def load_beside(**_: object) -> None:
        with ThreadPoolExecutor(1) as pool:
            beside.extend(pool.map(theirs, places))

    def theirs(place: dict[str, object]) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(**place)

    expected = [model.state_dict() for model in map(theirs, places)]
    monkeypatch.setattr("shared.model.load.AutoTokenizer.from_pretrained", load_beside)
    for source in (folder, file):
        beside.clear()
        assert _formats(load_model(source))
        for model, wanted in zip(beside, expected, strict=True):
            assert all(type(p) is torch.nn.Parameter for p in model.parameters())
            assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())


def test_experts_stay_in_their_file_until_each_is_packed(tmp_path: Path) -> None:
    """Transformers assembles them from one matrix per expert, gate and up side by side."""
    loaded = load_model(save(tmp_path, "mixtral", torch.bfloat16))
    experts = loaded.model.model.layers[2].mlp.experts
    assert loaded.acceleration.freed_bytes == 0
    for name in ("gate_up_proj", "down_proj"):
        kept, own = getattr(experts, name), build_family("mixtral").model.layers[2].mlp.experts
        assert lazy(kept).format == "bfloat16"
        assert torch.equal(lazy(kept).dequantised(), getattr(own, name).bfloat16().float())


def test_biases_of_experts_leave_their_file_with_it(tmp_path: Path) -> None:
    """A bias of all experts is a matrix, but no kernel reads it. The file is closed once the model is loaded."""
    config = GptOssConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.3,
    )
    own = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.normal_(0, 0.2)
    own.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.acceleration.experts == 2
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(ids).logits, own(ids).logits, rtol=1e-4, atol=1e-4)


def test_what_has_no_kernel_is_dequantised_and_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsuitable(module: object, **_: object) -> object:
        raise Unsuitable("does more than x @ weight.T + bias")

    monkeypatch.setattr("shared.model.substitution.apply.linear", unsuitable)
    monkeypatch.setattr("shared.model.substitution.reversible.packable", unsuitable)
    with structlog.testing.capture_logs() as lines:
        loaded = load_model(folder)
    (line,) = [line for line in lines if line["event"].startswith("weights of modules without")]
    assert line["weights"]["lm_head.weight"] == "does more than x @ weight.T + bias"
    assert lazy(loaded.model.lm_head.weight) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_experts_that_are_dequantised_are_named(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.model.weights.lazy._ASSEMBLIES", {})
    save(tmp_path, "mixtral", dtype)
    with structlog.testing.capture_logs() as lines:
        load_model(tmp_path)
    told = [line for line in lines if line["event"].startswith("matrices were dequantised")]
    reasons = {"a parameter of several matrices is read as float32": 12}
    assert [line["reasons"] for line in told] == ([reasons] if dtype == torch.bfloat16 else [])


def test_a_checkpoint_without_some_of_its_weights_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "llama", torch.float32)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, {"format": "pt"})
    with raises(UnsupportedModel, "WEIGHTS_MISSING"):
        load_model(tmp_path)


def test_a_file_that_is_written_to_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, "llama", torch.float32) / "model.safetensors"
    read = StableFile.read

    def cut_and_read(file: StableFile, offset: int, count: int) -> Tensor:
        if offset > 8:
            os.truncate(path, 100)
        return read(file, offset, count)

    monkeypatch.setattr(StableFile, "read", cut_and_read)
    with raises(Unavailable, "MODEL_FILE_CHANGED"):
        load_model(tmp_path)


def test_a_file_that_is_rewritten_with_the_same_size_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, "llama", torch.float32) / "model.safetensors"

    def rewrite(model: object) -> str:
        with path.open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\0\0\0\0")
        return "sha256:0"

    monkeypatch.setattr("shared.model.load.fingerprint", rewrite)
    with pytest.raises(Unavailable):
        load_model(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.5, 0.9999])
def test_a_file_that_is_cut_is_refused(folder: Path, tmp_path: Path, share: float) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "model.safetensors"
    os.truncate(path, int(path.stat().st_size * share))
    with raises(Corrupt, "MODEL_FILE_CORRUPT"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "F31"},
        {"shape": [-1, 4]},
        {"shape": [1 << 40, 1 << 40]},
        {"data_offsets": [0, 1 << 50]},
        {"data_offsets": [64, 0]},
        {"data_offsets": "0"},
    ],
    ids=str,
)
def test_a_table_that_lies_is_refused(folder: Path, tmp_path: Path, change: dict[str, object]) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["lm_head.weight"].update(change)
    lying = json.dumps(header).encode()
    path.write_bytes(len(lying).to_bytes(8, "little") + lying + data[8 + length :])
    with pytest.raises(Corrupt):
        load_model(tmp_path)


def test_an_unknown_family_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nonsense"}))
    with pytest.raises(NeapError) as caught:
        load_model(tmp_path)
    assert isinstance(caught.value, UnsupportedModel)


def _shards(folder: Path) -> list[Path]:
    model = build_family("llama").to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="20KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    return shards


def test_shards_are_one_model(folder: Path, tmp_path: Path) -> None:
    _shards(tmp_path)
    whole, sharded = load_model(folder), load_model(tmp_path)
    assert _formats(sharded) == {"bfloat16"}
    assert sharded.fingerprint == whole.fingerprint
    assert torch.equal(_logits(sharded), _logits(whole))


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    _shards(tmp_path)[1].unlink()
    with raises(NotFound, "MODEL_NOT_FOUND"):
        load_model(tmp_path)


def test_a_shard_that_is_replaced_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shards opened before would be those of another version than the shards opened later."""
    shard = _shards(tmp_path)[0]
    opened = SafetensorsReader.__init__

    def replace_and_open(reader: SafetensorsReader, *args: object, **options: object) -> None:
        opened(reader, *args, **options)
        new = tmp_path / "new"
        new.write_bytes(shard.read_bytes())
        new.replace(shard)

    monkeypatch.setattr(SafetensorsReader, "__init__", replace_and_open)
    with raises(Unavailable, "MODEL_FILE_CHANGED"):
        load_model(tmp_path)


def test_an_error_that_a_changed_file_causes_names_the_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights that were compared with the packed ones are not those that were packed."""
    path = save(tmp_path, "llama", torch.float32) / "model.safetensors"

    def overwrite(model: object) -> None:
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.seek(size // 2)
            file.write(b"\xff" * (size - size // 2))

    monkeypatch.setattr("shared.model.substitution.apply._substitute_modules", overwrite)
    with raises(Unavailable, "MODEL_FILE_CHANGED"):
        load_model(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_model_keeps_its_fingerprint_in_another_format(tmp_path: Path, dtype: torch.dtype) -> None:
    """Rounded to float16 and then to bfloat16, many weights are not what they are if they are rounded once."""
    save(tmp_path, "llama", torch.float32)
    assert load_model(tmp_path, dtype=dtype).fingerprint == load_model(tmp_path).fingerprint


def test_all_files_are_closed_afterwards(folder: Path, tmp_path: Path) -> None:
    def open_files() -> set[str]:
        links = Path("/proc/self/fd").iterdir()
        return {str(link.readlink()) for link in links if link.is_symlink()}

    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    load_model(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 1000)
    with pytest.raises(Corrupt):
        load_model(tmp_path)
    assert not [name for name in open_files() if name.startswith(str(tmp_path))]
