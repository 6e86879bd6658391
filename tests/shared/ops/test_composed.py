"""Graphs composed with conditional nodes: the host code on a fake of CUDA's runtime, and what its Python says of machines unfit for it."""

import subprocess
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shared.errors import InvalidInput, PreconditionFailed
from shared.ops import conditional
from shared.ops.conditional import ComposedGraph, compose
from tests.shared.ops.emulation import Bug, compiled

CONDITIONAL = "cuda/conditional.cu"
BUGS = [
    Bug("the deeper segment always runs", CONDITIONAL, "*count > 0 ? 1u : 0u", "1u"),
    Bug("segments in a row, on old counts", CONDITIONAL, "counts[i], &graph)", "counts[i], &rest)"),
    Bug("nothing is cleaned up", CONDITIONAL, "if (error.call) destroy_graph(made);", "if (error.call) return error;"),
    Bug("a condition of the root's", CONDITIONAL, "add_condition(graph, segment,", "add_condition(out.graph, segment,"),
    Bug("another segment's count", CONDITIONAL, "counts[i], &graph)", "counts[0], &graph)"),
]  # fmt: skip


def lines(program: Path, *arguments: int) -> list[str]:
    command = [str(program), *(str(argument) for argument in arguments)]
    environment = {"ASAN_OPTIONS": "detect_leaks=0"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def ran(program: Path, num_segments: int, *counts: int) -> list[int]:
    said = lines(program, num_segments, 0, *counts)
    assert said[-1] == "left 0 graphs 0 executables"
    return [int(line.removeprefix("ran ")) for line in said if line.startswith("ran")]


def check(program: Path) -> None:
    """What each mistake must break."""
    assert ran(program, 2, 3) == [0, 1]
    assert ran(program, 2, 0) == [0]
    assert ran(program, 2, 0, 5, 0) == [0, 0, 1, 0]
    assert ran(program, 4, 2, 1, 7) == [0, 1, 2, 3]
    assert ran(program, 4, 2, 0, 7) == [0, 1]
    # A body that ran leaves a count behind: the next launch must not look at it.
    assert ran(program, 3, 4, 4, 0, 4) == [0, 1, 2, 0]
    calls = [line for line in lines(program, 3, 0, 1, 1) if line.startswith("call")]
    for number in range(1, len(calls) + 1):
        said = lines(program, 3, number, 1, 1)
        name = calls[number - 1].removeprefix("call ")
        assert f"call {name} fails" in said
        errors = [line for line in said if line.startswith("error")]
        assert errors == [f"error 999 {name}"]
        assert said[-1] == "left 0 graphs 0 executables"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("composed"), harness="composed")


def test_deeper_segments_run_where_tokens_stay_and_every_failure_is_named_and_cleaned_up(
    program: Path,
) -> None:
    check(program)


def test_the_calls_come_in_order(program: Path) -> None:
    names = [line.removeprefix("call cudaGraph") for line in lines(program, 3, 0) if "call" in line]
    level = ["AddChildGraphNode", "ConditionalHandleCreate", "AddKernelNode", "AddNode"]
    assert names == ["Create", *level, *level, "AddChildGraphNode", "Instantiate", "ExecDestroy", "Destroy"]  # fmt: skip


def test_it_is_the_same_with_the_calls_of_cuda_12(tmp_path: Path) -> None:
    check(compiled(tmp_path, harness="composed", flags="-DCUDART_VERSION=12040"))


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_a_planted_bug_is_caught(bug: Bug, tmp_path: Path) -> None:
    flags = "-Drest=*std::make_unique<cudaGraph_t>().release()" if "rest" in bug.wrong else ""
    program = compiled(tmp_path, bug, "", "composed", flags)
    with pytest.raises(AssertionError):
        check(program)


class Captured:
    """A segment that only has a handle."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def raw_cuda_graph(self) -> int:
        return self.handle


def count(device: str = "cuda:1", **options: object) -> SimpleNamespace:
    """What `compose` asks of a count's tensor."""
    made = {"dtype": torch.int64, "numel": lambda: 1, "shape": (1,), "data_ptr": lambda: 77}
    return SimpleNamespace(**{**made, "device": torch.device(device), **options})


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """A machine fit for it, whose ops note their arguments."""
    made: list[tuple] = []

    def composed(*arguments: object) -> int:
        made.append(("compose", *arguments))
        return 41

    fake = SimpleNamespace(
        compose_graphs=composed,
        replay_graph=lambda *arguments: made.append(("replay", *arguments)),
        free_graph=lambda *arguments: made.append(("free", *arguments)),
        cuda_driver_version=lambda: 12080,
    )
    monkeypatch.setattr(conditional, "runs_on", lambda device: device == "cuda")
    monkeypatch.setattr(conditional, "torch", SimpleNamespace(
        ops=SimpleNamespace(neap=fake), int64=torch.int64, __version__="2.0",
        cuda=SimpleNamespace(CUDAGraph=Captured),
    ))  # fmt: skip
    return made


def test_a_composed_graph_is_replayed_and_freed_once(calls: list[tuple]) -> None:
    with compose([Captured(1), Captured(2), Captured(3)], [count(), count()]) as graph:
        graph.replay()
        graph.replay()
    graph.close()
    assert calls == [
        ("compose", [1, 2, 3], [77, 77], 1),
        ("replay", 41, 1),
        ("replay", 41, 1),
        ("free", 41),
    ]
    with pytest.raises(PreconditionFailed, match="closed"):
        graph.replay()


def test_segments_live_as_long_as_the_graph_which_is_freed_when_dropped(calls: list[tuple]) -> None:
    segment = Captured(1)
    seen = weakref.ref(segment)
    graph = ComposedGraph(7, [segment], [], 0)
    del segment
    assert seen() is not None
    assert not calls
    del graph
    assert seen() is None
    assert calls == [("free", 7)]


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([], "want one count less"),
        ([count("cpu")], "must be one int64 on a GPU"),
        ([count(dtype=torch.int32)], "must be one int64 on a GPU"),
        ([count(numel=lambda: 2)], "must be one int64 on a GPU"),
    ],
)
def test_wrong_counts_are_refused(calls: list[tuple], counts: list, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        compose([Captured(1), Captured(2)], counts)
    assert not calls


def test_counts_of_two_gpus_are_refused(calls: list[tuple]) -> None:
    with pytest.raises(InvalidInput, match="different GPUs"):
        compose([Captured(1), Captured(2), Captured(3)], [count(), count("cuda:0")])


def test_a_machine_unfit_for_it_is_named(
    calls: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conditional.torch.cuda, "CUDAGraph", object)
    with pytest.raises(PreconditionFailed, match="raw_cuda_graph"):
        compose([], [])
    monkeypatch.setattr(conditional.torch.ops.neap, "cuda_driver_version", lambda: 12030)
    with pytest.raises(PreconditionFailed, match=r"knows CUDA 12\.3"):
        compose([], [])
    monkeypatch.setattr(conditional, "runs_on", lambda device: False)
    with pytest.raises(PreconditionFailed, match="without CUDA"):
        compose([], [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused_by_the_library_itself() -> None:
    with pytest.raises(PreconditionFailed, match=r"built without CUDA|knows CUDA"):
        compose([], [])
