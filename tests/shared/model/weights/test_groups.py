"""AWQ's and GPTQ's folders, served from their own bytes: the numbers of the formats' definitions, bit for bit, on a CPU
and as a GPU keeps them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel

from shared.errors import Corrupt, UnsupportedModel
from shared.model.fingerprint import fingerprint
from shared.model.footprint import footprint
from shared.model.load import _build, load_model
from shared.model.loaded import wrap_model
from shared.model.numerics import numerics_of
from shared.model.remembered.packed import HEADER_BYTES
from shared.model.substitution.experts_on_gpu import GroupedExperts
from shared.model.substitution.invariant import make_invariant
from shared.model.weights.lazy import lazy, realise
from shared.model.weights.on_device import BlocksLinear, TakenBlocks
from shared.model.weights.reading import CheckpointFiles, replaced, safetensors_replacements, scheme_of
from tests.paged import make_runner
from tests.quantised_folders import AWQ, GPTQ, save_folder
from tests.shared.ops.interpreted import launched
from tests.tiers import tiered

# What a folder says, the format that its matrices have on a CPU, and those on a GPU.
KEPT: dict[str, tuple[dict[str, Any], str, str]] = {
    "awq, and half a group at the end": (AWQ | {"group_size": 128}, "Q5_0", "W4_128 W4_64"),
    "awq": (AWQ, "Q5_0", "W4_64"),
    "awq of 32": (AWQ | {"group_size": 32}, "Q5_0", "W4_32"),
    "gptq, symmetric": (GPTQ, "Q4_0", "W4_64"),
    "gptq": (GPTQ | {"sym": False}, "Q5_0", "W4_64"),
    "gptq of the second version": (GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, "Q5_0", "W4_64"),
    "gptq of whole rows": (GPTQ | {"group_size": -1}, "Q4_0", "W4_128 W4_64"),
    "gptq of 8 bits": (GPTQ | {"bits": 8}, "Q8_0", "Q8_0"),
}
WIDE = {
    "the order of its columns": GPTQ | {"desc_act": True},
    "no block has 8 bits": GPTQ | {"bits": 8, "sym": False},
    "no multiples of 32": GPTQ | {"group_size": 16},
}


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("shared.model.load.AutoTokenizer.from_pretrained", lambda **_: None)
    with torch.no_grad():
        yield


def as_on_a_gpu(folder: Path) -> PreTrainedModel:
    """What `load_model` makes of a folder for a GPU, in float32 on a CPU."""
    config = AutoConfig.from_pretrained(folder)
    scheme = scheme_of(config)
    del config.quantization_config
    with CheckpointFiles(None) as checkpoint:
        with replaced(safetensors_replacements(checkpoint, lazy=True, scheme=scheme)):
            model = _build({"pretrained_model_name_or_path": folder, "config": config}, torch.float32)
        taken = TakenBlocks(model)
        realise(model)
        taken.round_others(torch.float32)
        taken.place(torch.device("cpu"))
    return model.eval()


@pytest.mark.parametrize(
    ("name", "shards"), tiered([*((name, 1) for name in KEPT), ("awq", 3), ("gptq", 3)], {("awq", 1), ("gptq", 3)})
)
def test_a_cpu_multiplies_by_the_files_numbers(name: str, shards: int, tmp_path: Path) -> None:
    settings, kind, _ = KEPT[name]
    wide = save_folder(tmp_path, settings, shards=shards)
    loaded = load_model(tmp_path, compute_dtype=torch.float32)
    ids = torch.arange(3, 40)[None]
    wanted = wide(input_ids=ids).logits
    torch.testing.assert_close(loaded.model(input_ids=ids).logits, wanted, atol=1e-4, rtol=1e-4)
    assert loaded.acceleration is not None
    assert loaded.acceleration.formats[kind] == 14
    assert load_model(tmp_path).compute_dtype == torch.int8
    assert loaded.fingerprint == fingerprint(wide)
    plain = load_model(tmp_path, accelerate=False)
    for key, parameter in plain.model.named_parameters():
        assert torch.equal(parameter, wide.get_parameter(key)), key


PROMISED = ("awq of 32", "gptq of whole rows")  # between them all layouts of 4 bits; to try a promise takes seconds


@pytest.mark.parametrize("name", tiered(KEPT, PROMISED[:1]))
def test_a_gpu_keeps_four_bits(name: str, tmp_path: Path) -> None:
    settings, _, kinds = KEPT[name]
    wide = save_folder(tmp_path, settings)
    model = as_on_a_gpu(tmp_path)
    layers = [module for module in model.modules() if isinstance(module, BlocksLinear)]
    assert len(layers) == 14
    assert {layer.kind for layer in layers} == set(kinds.split())
    for key, parameter in model.named_parameters():
        stored = lazy(parameter)
        assert torch.equal(parameter if stored is None else stored.dequantised(), wide.get_parameter(key)), key
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(model(input_ids=ids).logits, wide(input_ids=ids).logits, atol=1e-4, rtol=1e-4)
    report = make_invariant(model)
    assert not report.left_alone
    if name not in PROMISED:
        return
    found = numerics_of(make_runner(replace(wrap_model(model), invariance=report)))
    assert found.is_exact, found.why_not


@pytest.mark.full
@pytest.mark.parametrize("name", ["awq", "gptq, symmetric"])
def test_experts_keep_four_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, kind, gpu_kind = KEPT[name]
    wide = save_folder(tmp_path, settings, experts=4)
    ids = torch.arange(3, 40)[None]
    wanted = wide(input_ids=ids).logits
    loaded = load_model(tmp_path, compute_dtype=torch.float32)
    torch.testing.assert_close(loaded.model(input_ids=ids).logits, wanted, atol=1e-4, rtol=1e-4)
    assert loaded.acceleration is not None
    assert loaded.acceleration.formats[kind] >= 8
    assert not loaded.acceleration.dequantised
    numbers = {key: parameter.numel() for key, parameter in wide.named_parameters() if ".experts." in key}
    memory = [part for key in numbers for part in lazy(loaded.model.get_parameter(key)).memory]  # type: ignore[union-attr]
    of_weight = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1] / 32
    assert sum(part.nbytes - HEADER_BYTES for part in memory) == of_weight * sum(numbers.values())
    model = as_on_a_gpu(tmp_path)
    experts = [module for module in model.modules() if isinstance(module, GroupedExperts)]
    assert {each for module in experts for _, sections in module.matrices for _, each in sections} == {gpu_kind}
    # 4 bits, and a scale and a zero for 64 columns.
    held = sum(part.nbytes for module in experts for part in module.buffers())
    assert held == (1 / 2 + 4 / 64) * sum(numbers.values())
    torch.testing.assert_close(model(input_ids=ids).logits, wanted, atol=1e-4, rtol=1e-4)
    report = make_invariant(model)
    assert report.experts == len(experts) == 2
    assert not report.left_alone
    tried = numerics_of(make_runner(replace(wrap_model(model), invariance=report)))
    assert tried.is_exact, tried.why_not
    pytest.importorskip("triton", reason="Triton has no wheel for this system")
    with monkeypatch.context() as patch:
        patch.setattr(
            "shared.model.substitution.experts_on_gpu.expert_linear",
            lambda x, held, index, grouping, rows, kind, bias: launched(
                "multiplied",
                [{"x": x, "weight": tuple(held), "kind": kind, "bias": bias, "capability": 90, "num_rows": rows}
                 | {"grouping": tuple(grouping)}],
                tmp_path,
            )[0],
        )  # fmt: skip
        found = model(input_ids=ids).logits
    for logits in (found, loaded.model(input_ids=ids).logits):
        assert torch.equal(logits.argmax(-1), wanted.argmax(-1))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("why", WIDE)
def test_what_no_block_holds_is_kept_in_16_bits_and_named(why: str, tmp_path: Path) -> None:
    wide = save_folder(tmp_path, WIDE[why])
    for key, parameter in wide.named_parameters():
        parameter.data = parameter.half().float() if "_proj" in key else parameter
    with structlog.testing.capture_logs() as lines:
        loaded = load_model(tmp_path)
    (line,) = [line for line in lines if line["event"].startswith("matrices were dequantised")]
    (reason,) = line["reasons"].items()
    assert why in reason[0]
    assert reason[1] == 14
    assert loaded.acceleration is not None
    assert not {"float32", "Q5_0"} & loaded.acceleration.formats.keys()
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(loaded.model(input_ids=ids).logits, wide(input_ids=ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_another_dtype_is_what_was_asked_for(dtype: torch.dtype, tmp_path: Path) -> None:
    wide = save_folder(tmp_path, AWQ)
    loaded = load_model(tmp_path, dtype=dtype)
    assert loaded.acceleration is not None
    assert loaded.acceleration.formats.keys() == {str(dtype).removeprefix("torch.")}
    assert loaded.fingerprint == fingerprint(wide)


@pytest.mark.parametrize("name", tiered(["awq", "gptq, symmetric", "gptq of 8 bits"], {"awq"}))
def test_it_takes_what_was_said_beforehand_and_a_tenth_more_than_the_file(name: str, tmp_path: Path) -> None:
    save_folder(tmp_path, KEPT[name][0] | {"group_size": 128}, width=512)
    on_disk = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    said = footprint(tmp_path, torch.device("cpu"))
    loaded = load_model(tmp_path)
    assert said is not None
    assert loaded.acceleration is not None
    assert said.weights == pytest.approx(loaded.acceleration.packed_bytes, rel=0.05)
    gpu = footprint(tmp_path, torch.device("cuda"))
    assert gpu is not None
    assert gpu.weights <= 1.11 * on_disk


def change(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    tensors.pop(name)
    save_file(tensors if tensor is None else tensors | {name: tensor}, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("part", "tensor"),
    [("scales", None), ("qzeros", torch.zeros(3, 2, dtype=torch.int32)), ("g_idx", torch.full((128,), 9))],
)
def test_tensors_that_contradict_each_other_are_refused(part: str, tensor: torch.Tensor | None, tmp_path: Path) -> None:
    save_folder(tmp_path, GPTQ)
    change(tmp_path, f"model.layers.1.mlp.up_proj.{part}", tensor)
    with pytest.raises(Corrupt, match=r"model\.layers\.1\.mlp\.up_proj") as caught:
        load_model(tmp_path)
    assert caught.value.reason == "MODEL_FILE_CORRUPT"


@pytest.mark.parametrize(
    "settings",
    [
        AWQ | {"version": "gemv"},
        GPTQ | {"is_marlin_format": True},
        *(
            pytest.param(settings, marks=pytest.mark.full)
            for settings in (
                AWQ | {"version": 1},
                GPTQ | {"bits": 3},
                GPTQ | {"checkpoint_format": "marlin"},
                GPTQ | {"group_size": 0},
                GPTQ | {"group_size": "128"},
                GPTQ | {"bits": None},
            )
        ),
    ],
    ids=str,
)
def test_other_packings_are_left_to_the_package_that_made_them(settings: dict[str, Any], tmp_path: Path) -> None:
    save_folder(tmp_path, GPTQ)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | {"quantization_config": settings}))
    with pytest.raises(UnsupportedModel) as caught:
        load_model(tmp_path)
    assert caught.value.reason in ("PACKAGE_MISSING", "UNSUPPORTED_MODEL")
