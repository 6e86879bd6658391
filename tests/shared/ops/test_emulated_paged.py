"""Paged attention on the emulator: the kernels against their reference in any order of warps, and planted bugs that
must be caught."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shared.ops import reference
from tests.shared.ops.emulated_cases import SEEDS
from tests.shared.ops.emulation import CODES, Bug, Call, EmulationError, blank, compiled, raw, run
from tests.shared.ops.paged_passes import CLOSE, Pass, drawn_pass

pytestmark = pytest.mark.full

KERNELS = "include/paged.cuh"
BUGS = [
    Bug(
        "a barrier dropped: the thread block's largest scores are read before they are written",
        KERNELS,
        "sums[threadIdx.x] = sum;\n  }\n  __syncthreads();\n",
        "sums[threadIdx.x] = sum;\n  }\n",
    ),
    Bug(
        "a warp's barrier dropped: scores are read before they are written",
        KERNELS,
        "    __syncwarp();\n    weigh(args, tile, weights, state);\n",
        "    weigh(args, tile, weights, state);\n",
    ),
    Bug(
        "a piece that ends a key late",
        KERNELS,
        "min(from + piece_keys, begin + count)",
        "min(from + piece_keys + 1, begin + count)",
    ),
    Bug(
        "a token that is written one position early",
        KERNELS,
        "slot_of(args, table, (int)position, 0)",
        "slot_of(args, table, (int)max(position - 1, (int64_t)0), 0)",
    ),
    Bug(
        "no fence before the ticket",
        "include/device.cuh",
        "  __threadfence();\n  __syncthreads();\n  if (threadIdx.x == 0) *scratch",
        "  __syncthreads();\n  if (threadIdx.x == 0) *scratch",
    ),
    Bug(
        "the partial results of a narrow tile of columns in the room of a wide one",
        KERNELS,
        "(min(kColumns, (int)args.value_width) + 2)",
        "(columns + 2)",
    ),
    Bug(
        "pieces cut by the number of thread blocks",
        KERNELS,
        "((count + (int)kPieces - 1) / (int)kPieces +",
        "((count + (int)gridDim.z - 1) / (int)gridDim.z +",
    ),
]


def paged_call(made: Pass, shares: int, seed: int) -> Call:
    """The call of a pass. Its buffers are copies; the last one is the output."""
    tokens, heads, width = made.q.shape
    kv_heads, value_width = made.v.shape[1:]
    sizes = (tokens, heads, kv_heads, width, value_width, len(made.keys), made.keys.shape[2], *made.block_tables.shape)
    strides = [stride for t in (made.q, made.k, made.v) for stride in t.stride()[:2]]
    numbers = (CODES[made.q.dtype], *sizes, *strides, made.scaling, made.softcap, made.window, shares)  # fmt: skip
    # The whole memory of a view, with the elements that its strides skip.
    inputs = [t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,)) for t in (made.q, made.k, made.v)]
    others = (
        made.keys,
        made.values,
        made.block_tables,
        made.table_indices,
        made.positions,
    )
    out = blank(tokens, heads, value_width, dtype=made.q.dtype)
    return Call("paged", numbers, (*(t.clone() for t in (*inputs, *others)), out), seed)


def check_paged(program: Path) -> None:
    short, long, longer, both = (([1, 1], [3, 40]), ([1, 2], [5, 140]), ([1, 1], [5, 270]), ([2, 2], [270, 270]))
    capped = {"window": 260, "softcap": 2.0}
    # Sequences, padding, (group, kv heads), (width, value width), block size, dtype, transposed, options, shares.
    cases = [
        (long, 1, (3, 2), (16, 24), 16, torch.float16, True, {}, (0, 1)),
        # In float32, because rounding to fewer bits would hide another order of sums.
        (longer, 0, (2, 1), (5, 36), 7, torch.float32, False, capped, (2, 3, 1)),
        # A tile of 4 columns beside one of 32, in several pieces.
        (both, 0, (2, 1), (5, 36), 7, torch.float32, False, {}, (0, 2, 3)),
        (short, 0, (1, 1), (8, 132), 3, torch.float32, True, {}, (1,)),
        (short, 1, (9, 1), (8, 8), 16, torch.bfloat16, False, {"window": 34}, (1,)),
        (short, 0, (2, 2), (40, 16), 16, torch.float16, False, {}, (0,)),
    ]  # fmt: skip
    for (counts, lengths), *shape, options, shares in cases:
        made = drawn_pass(counts, lengths, *shape, **options)
        expected = made.copied()
        wanted = reference.paged_attention(**vars(expected))
        # First every order of warps, then other numbers of thread blocks in a random order.
        orders = [(shares[0], seed) for seed in SEEDS] + [(share, 2) for share in shares[1:]]
        calls = [paged_call(made, share, seed) for share, seed in orders]
        last = made.alone(made.positions.argmax()[None])
        earlier = replace(last, keys=expected.keys, values=expected.values)
        calls.append(paged_call(earlier, 0, 0))
        run(program, calls)
        *company, alone = [call.buffers for call in calls]
        for buffers in company:
            torch.testing.assert_close(buffers[-1], wanted, **CLOSE[made.q.dtype])
            assert torch.equal(raw(buffers[-1]), raw(company[0][-1]))
            assert torch.equal(raw(buffers[3]), raw(expected.keys))
            assert torch.equal(raw(buffers[4]), raw(expected.values))
        assert torch.equal(alone[-1][0], company[0][-1][made.positions.argmax()])


def check_lost_blocks(program: Path) -> None:
    made = drawn_pass([1, 1, 1, 1], [9, 9, 9, 9], 0, (2, 1), (8, 8), 4, torch.float32)
    wanted = reference.paged_attention(**vars(made.copied()))
    made.block_tables[0, 1], made.block_tables[1, 2] = -5, len(made.keys)
    indices = torch.where(made.table_indices == 2, 4, made.table_indices)
    call = paged_call(replace(made, table_indices=indices), 0, 0)
    run(program, [call])
    lost = made.table_indices < 3
    assert call.buffers[-1][lost].isnan().all()
    torch.testing.assert_close(call.buffers[-1][~lost], wanted[~lost], **CLOSE[torch.float32])


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, "Future[Path]"]:
    """The programs with the original kernels ("") and with each bug, compiled in parallel."""
    pool = ThreadPoolExecutor(2)
    folder = tmp_path_factory.mktemp
    built = {"": pool.submit(compiled, folder("sound"), harness="emulated_paged")}
    for bug in BUGS:
        built[bug.name] = pool.submit(compiled, folder("bug"), bug, "", "emulated_paged")
    pool.shutdown(wait=False)
    return built


def test_paged_attention_equals_its_reference_in_any_order_of_warps(programs: dict[str, "Future[Path]"]) -> None:
    check_paged(programs[""].result())


def test_a_token_whose_block_does_not_exist_gets_nan_and_the_others_their_results(
    programs: dict[str, "Future[Path]"],
) -> None:
    check_lost_blocks(programs[""].result())


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_a_planted_bug_is_caught(bug: Bug, programs: dict[str, "Future[Path]"]) -> None:
    program = programs[bug.name].result()
    with pytest.raises((AssertionError, EmulationError)):
        check_paged(program)
