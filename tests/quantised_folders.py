"""Tiny random Llamas and Mixtrals as AWQ and GPTQ write them, packed by the formats' definitions, number by number."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedModel

AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}


def _words(columns: list[Tensor], bits: int) -> Tensor:
    """Words int32 whose lowest bits are the first column's."""
    words = torch.zeros_like(columns[0], dtype=torch.int64)
    for place, column in enumerate(columns):
        words |= column.long() << (bits * place)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def packed(quants: Tensor, zeros: Tensor, settings: dict[str, Any]) -> dict[str, Tensor]:
    """quants [K, N] and zeros [groups, N] int64 as `qweight` and `qzeros`."""
    bits = settings["bits"]
    count = 32 // bits

    def across(numbers: Tensor, order: list[int]) -> Tensor:
        words = [
            _words([numbers[:, count * word + i] for i in order], bits) for word in range(numbers.shape[1] // count)
        ]
        return torch.stack(words, 1)

    if settings["quant_method"] == "awq":
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        return {"qweight": across(quants, order), "qzeros": across(zeros, order)}
    rows = [_words([quants[count * word + i] for i in range(count)], bits) for word in range(len(quants) // count)]
    written = zeros if settings.get("checkpoint_format") == "gptq_v2" else zeros - 1
    return {"qweight": torch.stack(rows), "qzeros": across(written, list(range(count)))}


def _place_of(model: PreTrainedModel, name: str) -> Tensor:
    """Where a model holds a matrix of its checkpoint."""
    if ".experts." not in name:
        return model.get_parameter(name).data
    prefix, expert, which = name.removesuffix(".weight").replace("block_sparse_moe", "mlp").rsplit(".", 2)
    gates, down = (model.get_parameter(f"{prefix}.{each}_proj").data[int(expert)] for each in ("gate_up", "down"))
    return {"w1": gates[: len(gates) // 2], "w3": gates[len(gates) // 2 :], "w2": down}[which]


def save_folder(
    folder: Path, settings: dict[str, Any], *, shards: int = 1, width: int = 128, experts: int = 0
) -> PreTrainedModel:
    """Writes a Llama whose projections are quantised, all else float16, or a Mixtral of so many experts. The same model
    in float32, of the numbers (quant - zero) * scale. `shards`: files over which tensors are spread, in turn."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": 96, "hidden_size": width, "intermediate_size": 192, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    more: dict[str, Any] = {"initializer_range": 0.2} | ({"num_local_experts": experts} if experts else {})
    config = (MixtralConfig if experts else LlamaConfig)(**shape, **more)
    model = AutoModelForCausalLM.from_config(config)
    deepcopy(model).half().save_pretrained(folder)
    for parameter in model.parameters():
        parameter.data = parameter.half().float()
    tensors = load_file(folder / "model.safetensors")
    levels = 1 << settings["bits"]
    for name in [name for name in tensors if "_proj" in name or ".experts." in name]:
        weight = tensors.pop(name)
        num_rows, columns = weight.shape
        group = columns if settings["group_size"] == -1 else settings["group_size"]
        of_column = torch.arange(columns) // group
        if settings.get("desc_act"):
            of_column = of_column[torch.randperm(columns)]
        num_groups = int(of_column.max()) + 1
        quants = torch.randint(0, levels, (columns, num_rows))
        least = 0 if settings["quant_method"] == "awq" else 1
        zeros = torch.randint(least, levels, (num_groups, num_rows))
        zeros = torch.full_like(zeros, levels // 2) if settings.get("sym") else zeros
        scales = (0.1 / levels * (1 + torch.rand(num_groups, num_rows))).half()
        numbers = (quants - zeros[of_column]).float() * scales[of_column].float()
        _place_of(model, name).copy_(numbers.T)
        parts = packed(quants, zeros, settings) | {"scales": scales}
        if settings["quant_method"] == "gptq":
            parts["g_idx"] = of_column.int()
        tensors |= {f"{name.removesuffix('.weight')}.{part}": each.contiguous() for part, each in parts.items()}
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {f"model-{1 + n:05d}-of-{shards:05d}.safetensors": names[n::shards] for n in range(shards)}
    for file, own in files.items():
        save_file({name: tensors[name] for name in own}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, own in files.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    written = json.loads((folder / "config.json").read_text())
    written |= {"quantization_config": settings, "dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(written))
    return model.eval()
