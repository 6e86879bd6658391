from pathlib import Path

import pytest
import torch

from bench.peers.dequantised import float32_folder
from shared.errors import Corrupt
from shared.model.load import load_model
from tests.gguf_files import write_llama


@pytest.mark.full
def test_a_folder_is_the_file_in_float32_and_made_once(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_llama(file, add_more=lambda writer: writer.add_tokenizer_pre("smollm"))
    said: list[str] = []
    folder = float32_folder(file, tmp_path / "cache", said.append)
    assert float32_folder(file, tmp_path / "cache", said.append) == folder
    assert len(said) == 1
    stored, converted = load_model(file), load_model(folder)
    assert converted.fingerprint == stored.fingerprint
    assert converted.model.dtype == torch.float32
    assert converted.eos_token_ids == stored.eos_token_ids
    assert converted.tokenizer is not None
    assert stored.tokenizer is not None
    assert converted.tokenizer(" 12")["input_ids"] == stored.tokenizer(" 12")["input_ids"]


@pytest.mark.full
def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"no model")
    with pytest.raises(Corrupt):
        float32_folder(tmp_path / "bad.gguf", tmp_path / "cache", print)
    assert list((tmp_path / "cache").iterdir()) == []
