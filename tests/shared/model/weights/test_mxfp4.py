"""Folders of gpt-oss, whose experts are in MXFP4, as transformers writes them."""

import json
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import structlog
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from shared import ops
from shared.errors import Corrupt
from shared.model.fingerprint import fingerprint
from shared.model.footprint import footprint
from shared.model.load import load_model
from shared.model.substitution.experts_on_gpu import GroupedExperts
from shared.model.substitution.invariant import make_invariant
from shared.model.substitution.match import relative_error
from shared.model.weights.lazy import lazy
from shared.ops.experts import experts as run_experts
from tests.families import build_family
from tests.reasons import raises
from tests.shared.model.weights.test_groups import HEADER_BYTES, as_on_a_gpu

FLOATS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
OF_WEIGHT = 17 / 32  # bytes


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("shared.model.load.AutoTokenizer.from_pretrained", lambda **_: None)
    with torch.no_grad():
        yield


def save_folder(folder: Path, *, shards: int = 1, width: int = 128) -> PreTrainedModel:
    """The model of the folder, in float32. With several shards a matrix' exponents are not beside its quants."""
    own = build_family("gpt-oss-sliding", hidden_size=width, intermediate_size=96)
    own.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, columns, rows = tensors.pop(name).shape
        codes = torch.randint(16, (count, rows, columns // 32, 32))
        exponents = torch.randint(120, 126, (count, rows, columns // 32))
        numbers = torch.where(codes < 8, 1.0, -1.0) * FLOATS[codes % 8] * torch.exp2(exponents - 127.0)[..., None]
        # GGUF's blocks, and so neap's, have no negative zero.
        own.get_parameter(name).data = (numbers + 0.0).flatten(2).transpose(1, 2).contiguous()
        tensors[f"{name}_blocks"] = (codes[..., 0::2] | codes[..., 1::2] << 4).byte()
        tensors[f"{name}_scales"] = exponents.byte()
    path.unlink()
    names = sorted(tensors)
    files = {name: f"model-{names.index(name) % shards + 1:05d}-of-{shards:05d}.safetensors" for name in names}
    for file in sorted({*files.values()}):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    return own


def experts_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return {key: each for key, each in model.named_parameters() if ".experts." in key and each.dim() == 3}


@pytest.mark.parametrize("shards", [1, 3])
def test_a_cpu_multiplies_by_the_files_numbers(shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Mock(side_effect=run_experts)
    monkeypatch.setattr("shared.model.substitution.experts.run_experts", calls)
    packed = Mock(side_effect=ops.pack_blocks)
    monkeypatch.setattr(ops, "pack_blocks", packed)
    wide = save_folder(tmp_path, shards=shards)
    with structlog.testing.capture_logs() as lines:
        loaded = load_model(tmp_path, compute_dtype=torch.float32)
    assert not [line for line in lines if "dequantised" in line["event"]]
    assert loaded.acceleration is not None
    assert loaded.acceleration.experts == loaded.num_layers
    numbers = experts_of(wide)
    memory = [part for key in numbers for part in lazy(loaded.model.get_parameter(key)).memory]  # type: ignore[union-attr]
    held = sum(part.nbytes - HEADER_BYTES for part in memory)
    assert held == OF_WEIGHT * sum(each.numel() for each in numbers.values())
    # For the fingerprint, too, none is packed again, which would stay in memory and in what later starts map.
    # What tells matrices apart is two rows.
    rows = [len(call.args[0]) for call in packed.call_args_list if len(call.args[0]) > 2]
    assert sum(rows) == sum(len(each) * each.shape[2] for each in numbers.values())
    ids = torch.arange(3, 40)[None]
    wanted = wide(input_ids=ids).logits
    calls.reset_mock()
    assert relative_error(loaded.model(input_ids=ids).logits, wanted) < 1e-4
    assert calls.call_count == loaded.num_layers  # one op for all experts of a layer
    assert loaded.fingerprint == fingerprint(wide)
    plain = load_model(tmp_path, accelerate=False)
    for key, parameter in plain.model.named_parameters():
        assert torch.equal(parameter, wide.get_parameter(key)), key
    assert load_model(tmp_path).compute_dtype == torch.int8
    said = footprint(tmp_path, torch.device("cpu"))
    assert said is not None
    assert said.weights == pytest.approx(loaded.acceleration.packed_bytes, rel=0.05)


def test_plain_experts_with_biases_take_what_was_said_beforehand(tmp_path: Path) -> None:
    own = build_family("gpt-oss-sliding").bfloat16()
    own.save_pretrained(tmp_path)
    with structlog.testing.capture_logs() as lines:
        loaded = load_model(tmp_path)
    # Their matrices are read as float32. Their biases are no matrices.
    (reasons,) = [line["reasons"] for line in lines if "dequantised" in line["event"]]
    assert reasons == {"a parameter of several matrices is read as float32": 2 * loaded.num_layers}
    assert loaded.fingerprint == fingerprint(own)
    assert loaded.acceleration is not None
    said = footprint(tmp_path, torch.device("cpu"))
    assert said is not None
    held = sum(
        each.numel() * (2 if each.dim() == 2 and "_bias" not in key else 4) for key, each in own.named_parameters()
    )
    assert said.weights == held


def test_a_gpu_keeps_the_files_bytes(tmp_path: Path) -> None:
    wide = save_folder(tmp_path)
    model = as_on_a_gpu(tmp_path)
    experts = [module for module in model.modules() if isinstance(module, GroupedExperts)]
    assert {kind for module in experts for _, sections in module.matrices for _, kind in sections} == {"MXFP4"}
    held = sum(part.nbytes for module in experts for part in module.buffers())
    # 96 columns take as much as 128.
    assert held == sum(OF_WEIGHT * each.numel() / each.shape[1] * 128 for each in experts_of(wide).values())
    for key, parameter in model.named_parameters():
        stored = lazy(parameter)
        assert torch.equal(parameter if stored is None else stored.dequantised(), wide.get_parameter(key)), key
    ids = torch.arange(3, 40)[None]
    wanted = wide(input_ids=ids).logits
    assert relative_error(model(input_ids=ids).logits, wanted) < 1e-4
    report = make_invariant(model)
    assert report.experts == len(experts) == len(experts_of(wide)) // 2
    gpu = footprint(tmp_path, torch.device("cuda"))
    assert gpu is not None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda name, tensor: {} if "down_proj_scales" in name else {name: tensor}, "without one of blocks and scales"),
        (lambda name, tensor: {name: tensor[:, 1:] if "down_proj_scales" in name else tensor}, "do not fit each other"),
        (lambda name, tensor: {name: tensor.short() if "_up_proj_blocks" in name else tensor}, "do not fit each other"),
    ],
)
def test_tensors_that_do_not_fit_are_a_corrupt_file(change, why, tmp_path: Path) -> None:
    save_folder(tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    changed = [change(name, own) for name, own in load_file(path).items()]
    tensors = {name: own.contiguous() for each in changed for name, own in each.items()}
    save_file(tensors, path, {"format": "pt"})
    with raises(Corrupt, "MODEL_FILE_CORRUPT", match=why):
        load_model(tmp_path)
