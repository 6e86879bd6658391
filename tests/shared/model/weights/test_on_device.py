"""A .gguf file whose matrices stay in blocks, as on a GPU: the numbers of the file, tied weights once, no copy."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import nn
from transformers import PreTrainedModel

from shared.model.footprint import footprint
from shared.model.load import _build, _gguf_readers
from shared.model.loaded import wrap_model
from shared.model.numerics import numerics_of
from shared.model.recorder import NoRecorder
from shared.model.remembered.facts import Facts
from shared.model.runners import LayerCompiler
from shared.model.source import arguments_of
from shared.model.substitution.experts_on_gpu import GroupedExperts
from shared.model.substitution.invariant import make_invariant
from shared.model.weights.lazy import lazy, realise
from shared.model.weights.on_device import BlocksLinear, TakenBlocks
from shared.model.weights.reading import CheckpointFiles, replaced
from shared.ops.products import expert_linear
from tests.gguf_files import write_llama
from tests.paged import make_runner
from tests.shared.model.weights.test_gguf_families import CASES, write
from tests.tiers import tiered

KINDS = {"attn_q": Kind.Q4_K, "attn_v": Kind.Q6_K, "ffn_down": Kind.Q5_0, "token_embd": Kind.Q4_1, "ffn_up": Kind.F16}


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_llama(tmp_path / "tiny.gguf", KINDS, width=256, inner=512, tied=request.param)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def read(path: Path, dtype: torch.dtype, *, in_blocks: bool) -> PreTrainedModel:
    """The file's model as a GPU computes it, with its matrices in blocks or widened once."""
    with CheckpointFiles(None) as checkpoint, replaced(_gguf_readers(checkpoint, Facts()).replacements):
        model = _build(arguments_of(path), torch.float32)
        taken = TakenBlocks(model) if in_blocks else None
        realise(model)
        if taken is None:
            return model.to(dtype)
        taken.round_others(dtype)
        taken.place(torch.device("cpu"))
    model.config.pad_token_id = None
    return model.eval()


def logits(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(3, 40)[None]
    return model(input_ids=ids, use_cache=False).logits


def test_a_model_in_blocks_is_the_one_that_was_widened(path: Path) -> None:
    own, wide = (read(path, torch.float32, in_blocks=each) for each in (True, False))
    torch.testing.assert_close(logits(own), logits(wide), atol=1e-4, rtol=1e-4)
    wanted = dict(wide.named_parameters())
    for name, parameter in own.named_parameters():
        stored = lazy(parameter)
        numbers = parameter if stored is None else stored.dequantised()
        assert torch.equal(numbers, wanted[name]), name
    kinds = {module.kind for module in own.modules() if isinstance(module, BlocksLinear)}
    assert kinds >= {"Q4_K", "Q6_K", "Q5_0", "Q8_0"}


def test_numbers_are_rounded_to_the_dtype_that_a_gpu_computes_in(path: Path) -> None:
    model = read(path, torch.bfloat16, in_blocks=True)
    assert model.dtype == torch.bfloat16
    assert model.model.embed_tokens(torch.tensor([[5]])).dtype == torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert logits(model).dtype == torch.bfloat16
    close = 0.05 * logits(read(path, torch.float32, in_blocks=False)).abs().max()
    assert (logits(model) - logits(read(path, torch.float32, in_blocks=True))).abs().max() <= close


def test_it_takes_what_was_said_beforehand(path: Path) -> None:
    model = read(path, torch.bfloat16, in_blocks=True)
    stored = [(parameter, lazy(parameter)) for parameter in model.parameters()]
    parts = [part for parameter, own in stored for part in ((parameter,) if own is None else own.memory)]
    held = {part.data_ptr(): part.nbytes for part in parts if part.numel()}
    said = footprint(path, torch.device("cuda"))
    assert said is not None
    assert abs(sum(held.values()) - said.weights) <= 0.01 * said.weights
    widened = footprint(path, torch.device("cuda"), dtype=torch.bfloat16)
    assert widened is not None
    assert widened.weights > 1.5 * said.weights
    buffers = {buffer.data_ptr() for name, buffer in model.named_buffers() if "inv_freq" not in name and buffer.numel()}
    assert buffers <= held.keys()


@pytest.mark.parametrize("kinds", [(Kind.Q8_0,) * 3, (Kind.Q4_0, Kind.Q8_0, Kind.Q5_0)], ids=["one kind", "several"])
def test_experts_stay_in_blocks(
    kinds: tuple[Kind, Kind, Kind], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gate and up may be in blocks of different kinds."""
    architecture, config, add_more = CASES["qwen3moe"]
    file = tmp_path / "experts.gguf"
    write(file, architecture, config, add_more, kinds)
    own, wide = (read(file, torch.float32, in_blocks=each) for each in (True, False))
    wanted = logits(wide)
    torch.testing.assert_close(logits(own), wanted, atol=1e-4, rtol=1e-4)
    report = make_invariant(own)
    assert report.experts == 2
    assert not report.left_alone
    experts = [module for module in own.modules() if isinstance(module, GroupedExperts)]
    rows = [(config.moe_intermediate_size, kind.name) for kind in kinds[:2]]
    into = ((2 * config.moe_intermediate_size, "Q8_0"),) if kinds[0] == kinds[1] else tuple(rows)
    matrices = ("gate_up_proj", into), ("down_proj", ((config.hidden_size, kinds[2].name),))
    assert {module.matrices for module in experts} == {matrices}
    weights = {name: parameter for name, parameter in wide.named_parameters() if "experts" in name}
    for name, parameter in weights.items():
        assert torch.equal(own.get_parameter(name).stored.dequantised(), parameter), name  # type: ignore[attr-defined]
    held = sum(part.nbytes for module in experts for part in module.buffers())
    numbers = sum(parameter.numel() for parameter in weights.values())
    if kinds[0] == kinds[1]:
        assert held <= 1.07 * 34 / 32 * numbers * 2  # rows of one block fill half a step of 64 columns
    said, in_bfloat16 = (footprint(file, torch.device("cuda"), dtype=dtype) for dtype in (None, torch.bfloat16))
    assert said is not None
    assert in_bfloat16 is not None
    assert in_bfloat16.weights - said.weights == 2 * numbers - held
    monkeypatch.setattr("shared.model.substitution.experts_on_gpu.expert_linear", lambda *_: 1.1 * expert_linear(*_))
    back = read(file, torch.float32, in_blocks=True)
    left = make_invariant(back)
    assert len(left.left_alone) == 2
    assert not [buffer for module in back.modules() if "Experts" in str(type(module)) for buffer in module.buffers()]
    torch.testing.assert_close(logits(back), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("path", "compiles"), tiered([(True, False), (False, True)], {(True, False)}), indirect=["path"]
)
def test_exact_is_promised_of_a_model_in_blocks(path: Path, compiles: bool) -> None:
    model = read(path, torch.float32, in_blocks=True)
    report = make_invariant(model)
    assert not report.left_alone
    loaded = replace(wrap_model(model), invariance=report)
    recorder = NoRecorder() if compiles else None
    runner = make_runner(loaded, recorder=recorder, transform=LayerCompiler("aot_eager") if compiles else None)
    assert runner.compiles == compiles
    found = numerics_of(runner)
    assert found.is_exact, found.why_not
