"""Checkpoints that transformers loads quantised: BitNet, whose modules are part of transformers, and fp8, which a CPU
dequantises."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from shared.errors import UnsupportedModel
from shared.model.fingerprint import fingerprint
from shared.model.load import load_model
from shared.model.loaded import LoadedModel
from shared.model.weights.quantised import dequantises
from tests.reasons import raises

SETTINGS = {"bitnet": {"quant_method": "bitnet"}, "fp8": {"quant_method": "fp8", "weight_block_size": [16, 16]}}


@pytest.fixture(autouse=True)
def _no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.model.load.AutoTokenizer.from_pretrained", lambda **_: None)


@pytest.fixture(autouse=True)
def _no_compilation() -> Iterator[None]:
    """BitNet's modules would compile for seconds."""
    with torch.compiler.set_stance("force_eager"):
        yield


def _quantised(weight: Tensor, method: str) -> dict[str, Tensor]:
    if method == "bitnet":
        from transformers.integrations.bitnet import pack_weights  # imports torch's compiler

        return {"": pack_weights(weight.sign()), "_scale": weight.new_tensor([4.0])}
    tiles = torch.full((weight.shape[0] // 16, weight.shape[1] // 16), 0.25)
    return {"": (weight.float() * 4).to(torch.float8_e4m3fn), "_scale_inv": tiles}


def save_quantised(folder: Path, method: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A random Llama whose projections are quantised; all else is `dtype`."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.2,
        )
    )
    model.to(dtype).save_pretrained(folder)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        parts = _quantised(tensor, method) if "_proj" in name else {"": tensor}
        tensors |= {name + suffix: part.contiguous() for suffix, part in parts.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = SETTINGS[method]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@torch.no_grad()
def _logits(loaded: LoadedModel) -> Tensor:
    return loaded.model(input_ids=torch.arange(9)[None]).logits


def _load(folder: Path) -> tuple[LoadedModel, list[str]]:
    with structlog.testing.capture_logs() as lines:
        loaded = load_model(folder)
    return loaded, [line["event"] for line in lines]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_quantised_modules_are_kept_and_named(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = save_quantised(tmp_path, "bitnet", dtype)
    loaded, events = _load(folder)
    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    assert "the model is served by the quantised modules of its own package" in events
    assert not any("dequantised" in event for event in events)
    assert ("accelerated" in events) == (dtype == torch.float32)
    projections = [module for module in loaded.model.modules() if type(module).__name__ == "BitLinear"]
    assert len(projections) == 14
    assert all(module.weight.dtype == torch.uint8 for module in projections)
    expected = theirs(input_ids=torch.arange(9)[None]).logits
    tolerance = 0 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(_logits(loaded), expected, rtol=tolerance, atol=tolerance)


def test_weights_that_transformers_dequantises_are_named(tmp_path: Path) -> None:
    """A CPU has no fp8 modules. Transformers gives float32 or bfloat16 layers, and used to mix the two."""
    folder = save_quantised(tmp_path, "fp8")
    tensors = load_file(folder / "model.safetensors")
    loaded, events = _load(folder)
    assert any(event.startswith("quantised weights were dequantised") for event in events)
    assert "accelerated" in events
    name = "model.layers.1.mlp.up_proj.weight"
    expected = (tensors[name].float() * 0.25).to(torch.bfloat16)
    assert torch.equal(loaded.model.get_parameter(name).to(torch.bfloat16), expected)
    assert _logits(loaded).isfinite().all()


def test_a_folder_of_torchao_asks_for_its_package_or_another_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers writes int8 weights: scales in float32, which no block of neap's holds."""
    monkeypatch.setattr("transformers.quantizers.quantizer_torchao.is_torchao_available", lambda: False)
    LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    default = {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {"group_size": None}}
    settings = {"quant_method": "torchao", "quant_type": {"default": default}}
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors", {"format": "pt"})
    with raises(UnsupportedModel, "PACKAGE_MISSING", match="torchao.*install it.*AWQ or GPTQ"):
        load_model(tmp_path)


def test_fingerprints_tell_quantised_checkpoints_apart(tmp_path: Path) -> None:
    seen = set()
    for name in ("bitnet", "fp8"):
        seen.add(_load(save_quantised(tmp_path / name, name))[0].fingerprint)
    assert _load(tmp_path / "bitnet")[0].fingerprint in seen
    path = tmp_path / "bitnet" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] ^= 1
    save_file(tensors, path, {"format": "pt"})
    seen.add(_load(tmp_path / "bitnet")[0].fingerprint)
    torch.manual_seed(0)
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    del config["quantization_config"]
    seen.add(fingerprint(LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16)))
    assert len(seen) == 4


def test_nothing_of_the_file_stays_mapped(tmp_path: Path) -> None:
    """A process dies of SIGBUS when it reads a mapped file that has been cut."""
    folder = save_quantised(tmp_path, "bitnet")
    loaded, _ = _load(folder)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    before = _logits(loaded)
    os.truncate(folder / "model.safetensors", 0)
    assert torch.equal(_logits(loaded), before)


class Late(nn.Module):
    """Like the layers of compressed-tensors: dequantises its weight when it first runs."""

    def __init__(self, layer: nn.Linear, dequantises_weight: bool) -> None:
        super().__init__()
        self.dequantises_weight = dequantises_weight
        self.weight = nn.Parameter((layer.weight * 100).to(torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.dequantises_weight and self.weight.dtype == torch.int8:
            self.weight = nn.Parameter(self.weight / 100, requires_grad=False)
        return x @ (self.weight.float()).T


@pytest.mark.parametrize("late", [True, False])
def test_weights_that_dequantise_when_the_model_first_runs_are_noticed(late: bool) -> None:
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    model.config.quantization_config = {"quant_method": "late"}
    model.lm_head = Late(model.lm_head, late)
    assert dequantises(model) == late


def test_modules_that_do_not_run_here_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Tensor:
        raise RuntimeError("no kernel for this device")

    monkeypatch.setattr("transformers.integrations.bitnet.BitLinear.forward", fail)
    with pytest.raises(UnsupportedModel, match="do not run on cpu"):
        load_model(save_quantised(tmp_path, "bitnet"))
