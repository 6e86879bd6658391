"""Every op on a GPU: against its reference, captured in a CUDA graph and replayed with other contents, run again and
again.

The parity of each case is also checked on the CPU's kernels: so the cases themselves are known to be sound where there
is no GPU.
"""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from shared.ops import layer_norm, rms_norm
from shared.ops.blocks import LAYOUTS, Blocks, arranged
from shared.ops.paged import paged_attention
from shared.ops.products import blocks_linear, invariant_linear
from tests.gpu.kernel_cases import CASES, Case, Inputs, Outputs, copied
from tests.shared.ops.drawn_blocks import drawn_blocks
from tests.shared.ops.paged_passes import WRONG_ARGUMENTS, Pass, drawn_pass

REPEATS = 100

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]
on_gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
every_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def agree(case: Case, outputs: Outputs, expected: Outputs) -> None:
    for found, wanted in zip(outputs, expected, strict=True):
        if wanted.is_floating_point():
            torch.testing.assert_close(found.cpu(), wanted, **case.close)
        else:
            assert torch.equal(found.cpu(), wanted)


def captured(run: Callable[[], Outputs]) -> tuple[torch.cuda.CUDAGraph, Outputs]:
    """The graph of a run and the tensors that its replays write."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # what is made once only is made now
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    return graph, outputs


def overwrite(inputs: Inputs, contents: Inputs) -> None:
    for target, source in zip(inputs, contents, strict=True):
        if target is not None and source is not None:
            target.copy_(source)


@every_case
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_an_op_agrees_with_its_reference(case: Case, device: str) -> None:
    inputs = case.seeded(1)
    outputs = case.run(*copied(inputs, device))
    agree(case, outputs, case.expected(*copied(inputs, "cpu")))


@every_case
@on_gpu
def test_a_captured_op_computes_what_its_inputs_then_hold(case: Case, device: str) -> None:
    inputs = copied(case.seeded(1), device)
    graph, outputs = captured(lambda: case.run(*inputs))
    for seed in (2, 3):
        contents = case.seeded(seed)
        overwrite(inputs, contents)
        graph.replay()
        torch.cuda.synchronize()
        agree(case, outputs, case.expected(*copied(contents, "cpu")))


@every_case
@on_gpu
def test_a_hundred_runs_give_the_same_bits(case: Case, device: str) -> None:
    inputs = copied(case.seeded(1), device)
    first = [output.clone() for output in case.run(*copied(inputs, device))]
    for _ in range(REPEATS):
        for output, expected in zip(case.run(*copied(inputs, device)), first, strict=True):
            assert torch.equal(output, expected)


@on_gpu
@pytest.mark.parametrize("width", [64, 80, 128])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_a_token_attends_to_the_same_bits_alone_and_in_company(device: str, width: int, group: int) -> None:
    """Alone, a token's pieces are shared out among many thread blocks; among hundreds, one thread block takes them
    all."""
    made = drawn_pass([1] * 300, [500, 3, 129] * 100, 0, (group, 2), (width, width), 16, torch.float16)  # fmt: skip
    tensors = copied(list(vars(made).values())[:8], device)
    q, k, v, *pools, block_tables, indices, positions = tensors
    run = torch.ops.neap.paged_attention.default
    together = run(q, k, v, *pools, block_tables, indices, positions, 0.2)
    for token in range(0, 300, 37):
        own = slice(token, token + 1)
        alone = run(q[own], k[own], v[own], *pools, block_tables, indices[own], positions[own], 0.2)
        assert torch.equal(alone[0], together[token])


@on_gpu
@pytest.mark.parametrize("kind", ["", *LAYOUTS])
@pytest.mark.parametrize("width", [576, 1024, 4096])
def test_a_token_multiplies_to_the_same_bits_in_any_company(device: str, width: int, kind: str) -> None:
    if kind and width % LAYOUTS[kind].block:
        pytest.skip("whole blocks of this kind have more columns")
    x, rows = torch.randn(2048, width, dtype=torch.bfloat16, device=device), 1000
    if kind:
        blocks = Blocks(*(part.to(device) for part in arranged(drawn_blocks(rows, width, kind), kind, width)))
        run = partial(blocks_linear, blocks=blocks, kind=kind)
    else:
        run = partial(invariant_linear, weight=torch.randn(rows, width, dtype=torch.bfloat16, device=device))
    together = run(x)
    for count in (1, 7, 16, 24, 48, 100, 192, 256, 512, 1024):
        for first in (0, 5, 700):
            assert torch.equal(run(x[first : first + count]), together[first : first + count])


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [80, 4096])
def test_norms_are_those_of_torch_and_do_not_depend_on_company(device: str, width: int, dtype: torch.dtype) -> None:
    x, weight, bias = (torch.randn(*shape, width, device=device).to(dtype) for shape in ((300,), (), ()))
    wide = x.float(), (width,), weight.float()
    close = {"atol": 0.1, "rtol": 0.02} if dtype == torch.bfloat16 else {"atol": 1e-4, "rtol": 1e-4}
    normed = rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(normed.float(), torch.nn.functional.rms_norm(*wide, 1e-5), **close)
    centred = layer_norm(x, weight, bias, 1e-5)
    torch.testing.assert_close(centred.float(), torch.nn.functional.layer_norm(*wide, bias.float(), 1e-5), **close)
    for first, count in ((0, 1), (7, 40), (299, 1)):
        assert torch.equal(rms_norm(x[first : first + count], weight, 1e-5), normed[first : first + count])


@on_gpu
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_prompts_token_attends_to_the_same_bits_whatever_is_read_with_it(
    device: str, dtype: torch.dtype, window: int
) -> None:
    """In a tile with others of its sequence, and in one without."""
    made = drawn_pass([70, 3], [4500, 20], 0, (4, 2), (128, 128), 16, dtype, window=window)
    tensors = copied(list(vars(made).values())[:8], device)
    q, k, v, *pools, block_tables, indices, positions = tensors
    run = torch.ops.neap.paged_attention.default
    in_order = (indices * 10000 + positions).argsort()
    q, k, v, indices, positions = (each[in_order] for each in (q, k, v, indices, positions))
    together = run(q, k, v, *pools, block_tables, indices, positions, 0.2, 0.0, window)
    for own in (slice(0, 1), slice(1, 6), slice(13, 14), slice(69, 73)):
        alone = run(q[own], k[own], v[own], *pools, block_tables, indices[own], positions[own], 0.2, 0.0, window)
        assert torch.equal(alone, together[own])


@on_gpu
def test_places_that_do_not_exist_give_nan_and_harm_nobody(device: str) -> None:
    made = drawn_pass([1, 1, 1, 1], [9, 9, 9, 9], 0, (2, 1), (8, 8), 4, torch.float32)
    sound = made.copied().run()
    made.block_tables[0, 1], made.block_tables[1, 2] = -5, len(made.keys)
    lost = made.table_indices < 3
    made.table_indices[made.table_indices == 2] = 4
    out = torch.ops.neap.paged_attention.default(*copied(list(vars(made).values())[:8], device), 0.3).cpu()
    assert out[lost].isnan().all()
    torch.testing.assert_close(out[~lost], sound[~lost], atol=1e-4, rtol=1e-3)


@on_gpu
@pytest.mark.parametrize(
    ("name", "value", "message"),
    WRONG_ARGUMENTS,
)
def test_wrong_arguments_of_paged_attention_are_named(
    device: str, name: str, value: Tensor | int, message: str
) -> None:
    made = Pass(
        q=torch.randn(2, 4, 8),
        k=torch.randn(2, 2, 8),
        v=torch.randn(2, 2, 8),
        keys=torch.zeros(3, 2, 4, 8),
        values=torch.zeros(3, 2, 4, 8),
        block_tables=torch.tensor([[2, 0, 1]]),
        table_indices=torch.tensor([0, 0]),
        positions=torch.tensor([3, 4]),
    )
    arguments = {name: each.to(device) if isinstance(each, Tensor) else each for name, each in vars(made).items()}
    paged_attention(**arguments)
    with pytest.raises(RuntimeError, match=message):
        paged_attention(**{**arguments, name: value.to(device) if isinstance(value, Tensor) else value})
