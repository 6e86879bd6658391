"""Loading a .gguf file: the model is that of the file, the file is parsed once, and the log has its lines."""

from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest
import structlog
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from tokenizers import pre_tokenizers
from transformers import modeling_gguf_pytorch_utils as checkpoints

from shared.errors import NotFound, UnsupportedModel
from shared.model import gguf as module
from shared.model.load import load_model

WIDTH, NUM_LAYERS, INNER = 64, 2, 96


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in Q8_0 with a byte vocabulary."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "<eos>", "he"]
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(NUM_LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // 2)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(len(letters))
    generator = np.random.default_rng(0)

    def add(name: str, rows: int, columns: int) -> None:
        weights = generator.standard_normal((rows, columns), dtype=np.float32) / 8
        packed = gguf.quantize(weights, GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q8_0)

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(WIDTH, np.float32))

    add("token_embd.weight", len(tokens), WIDTH)
    norm("output_norm.weight")
    for layer in range(NUM_LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            norm(f"blk.{layer}.{name}.weight")
        for name, rows, columns in (
            ("attn_q", WIDTH, WIDTH),
            ("attn_k", WIDTH // 2, WIDTH),
            ("attn_v", WIDTH // 2, WIDTH),
            ("attn_output", WIDTH, WIDTH),
            ("ffn_gate", INNER, WIDTH),
            ("ffn_up", INNER, WIDTH),
            ("ffn_down", WIDTH, INNER),
        ):
            add(f"blk.{layer}.{name}.weight", rows, columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def replaced() -> tuple[object, ...]:
    return gguf.GGUFReader, gguf.get_tensor_name_map, checkpoints.load_gguf_checkpoint


def test_is_parsed_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: Counter[str] = Counter()
    reader, names = module.ArrayReader.__init__, gguf.TensorNameMap.__init__

    def read(self: object, *args: object) -> None:
        made["reader"] += 1
        reader(self, *args)

    def name(self: object, *args: object) -> None:
        made["names"] += 1
        names(self, *args)

    monkeypatch.setattr(module.ArrayReader, "__init__", read)
    monkeypatch.setattr(gguf.TensorNameMap, "__init__", name)
    before = replaced()
    load_model(file)
    assert made == {"reader": 1, "names": 1}
    assert replaced() == before


def test_weights_and_tokenizer_are_those_of_the_file(file: Path) -> None:
    loaded = load_model(file, accelerate=False)
    weights = dict(loaded.model.named_parameters())
    for ours, theirs in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down.weight"),
    ):
        (tensor,) = [t for t in gguf.GGUFReader(file).tensors if t.name == theirs]
        expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
        torch.testing.assert_close(weights[ours], expected, rtol=0, atol=0)
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


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.05, 0.5, 0.9])
def test_a_file_that_is_cut_is_refused(file: Path, tmp_path: Path, share: float) -> None:
    cut = tmp_path / "cut.gguf"
    data = file.read_bytes()
    cut.write_bytes(data[: int(len(data) * share)])
    before = replaced()
    with pytest.raises((UnsupportedModel, NotFound)):
        load_model(cut)
    assert replaced() == before
