"""A folder written as a .gguf file is the same model, and what cannot be written is refused."""

from pathlib import Path

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers

from bench.peers.gguf_file import file_type, write_gguf
from shared.errors import UnsupportedModel
from shared.model.load import load_model


def saved(folder: Path, **changes: object) -> Path:
    """A random llama of 2 layers with 4 heads, 2 of keys, and a byte-level tokenizer."""
    torch.manual_seed(0)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: index for index, text in enumerate([*letters, "<eos>", "he"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.save_pretrained(folder)
    values = {
        "vocab_size": len(vocabulary),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "eos_token_id": vocabulary["<eos>"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    }
    hf.LlamaForCausalLM(hf.LlamaConfig(**{**values, **changes})).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("tied", [True, False])
def test_the_file_is_the_model_of_the_folder(tmp_path: Path, tied: bool) -> None:
    folder = saved(tmp_path / "folder", tie_word_embeddings=tied)
    path = tmp_path / "model.gguf"
    write_gguf(folder, path)
    assert file_type(path) == "ALL_F32"
    written, original = (load_model(source, accelerate=False) for source in (path, folder))
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(written.model(ids).logits, original.model(ids).logits)
    assert written.eos_token_ids == original.eos_token_ids
    assert written.tokenizer is not None
    assert original.tokenizer is not None
    assert written.tokenizer("he said")["input_ids"] == original.tokenizer("he said")["input_ids"]


@pytest.mark.parametrize(
    "changes",
    [{"attention_bias": True}, {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}],
)
def test_models_that_would_be_written_wrongly_are_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    folder = saved(tmp_path / "folder", **changes)
    with pytest.raises(UnsupportedModel):
        write_gguf(folder, tmp_path / "model.gguf")
