"""However a program ends, and whatever its engine is doing then, it ends as it would without one."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shared.engine.engine import Engine
from shared.engine.request.request import GenerationRequest, StoppingParams
from shared.ladder.policy import DepthPolicy
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
# Everything is imported once: each child of a fork runs one program, and ends by the interpreter's own end.
PROGRAM = """
import json, os, signal, sys, threading
from shared.light_imports import import_transformers_lightly
import_transformers_lightly()
from shared.engine.engine import Engine
from shared.engine.request.request import GenerationRequest, StoppingParams
from shared.ladder.policy import DepthPolicy
from shared.model.loaded import wrap_model
from tests.worker import build_model

ends = {}
for name, program in json.load(sys.stdin).items():
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        break
    os.close(writer)
    said = open(reader).read()
    ends[name] = (os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said)
else:
    print(json.dumps(ends))
    program = ""
if program:
    loaded = wrap_model(build_model())
    request = GenerationRequest(
        (1, 2, 3),
        policy=DepthPolicy("full"),
        stopping=StoppingParams(max_tokens=2000, ignore_eos=True),
    )
exec(program)
"""
ENDINGS = {
    "the next line fails": ("engine = Engine(loaded); raise ValueError('mine')", 1, "ValueError: mine"),
    "in the middle of an answer": (
        "handle = Engine(loaded).submit(request); handle.next_event(60); sys.exit(4)", 4, ""
    ),
    "dropped": ("Engine(loaded).warm_up(); Engine(loaded)", 0, ""),
    "interrupted while it answers": (
        "handle = Engine(loaded).submit(request)\n"
        "for event in handle.events(): os.kill(os.getpid(), signal.SIGINT)",
        -signal.SIGINT,
        "KeyboardInterrupt",
    ),
    "a thread goes on with it": (
        "engine = Engine(loaded); answers = []\n"
        "threading.Thread(target=lambda: print(len(engine.generate((1, 2), policy='full',"
        " max_tokens=5, ignore_eos=True).tokens))).start()",
        0,
        "5",
    ),
    "a forked child": (
        "engine = Engine(loaded); engine.warm_up(); handle = engine.submit(request)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    for call in (lambda: engine.submit(request), engine.close, lambda: sys.exit(5)):\n"
        "        try: call()\n"
        "        except Exception as error: print(error.reason)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))",
        5,
        "FORKED",
    ),
    "threads fork at once": (
        "engines = [Engine(loaded), Engine(wrap_model(build_model()))]\n"
        "def forks(event=None):\n"
        "    child = os.fork()\n"
        "    if child == 0: os._exit(0)\n"
        "    os.waitpid(child, 0)\n"
        "handles = [engine.submit(request, on_event=forks) for engine in engines]\n"
        "forking = [threading.Thread(target=lambda: [forks() for _ in range(100)]) for _ in range(3)]\n"
        "for thread in forking: thread.start()\n"
        "for thread in forking: thread.join()\n"
        "for handle in handles: handle.cancel()\n"
        "print(len(engines[0].generate((1, 2), policy='full', max_tokens=5, ignore_eos=True).tokens))",
        0,
        "5",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def ends() -> dict[str, tuple[int, str]]:
    """(status, output) of each program."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps({name: program for name, (program, _, _) in ENDINGS.items()}),
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    return json.loads(ended.stdout)


@pytest.mark.full
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_ends_as_it_would_without_an_engine(ends, ending: str) -> None:
    _, status, last_line = ENDINGS[ending]
    # Engines log what they promise.
    said = [line for line in ends[ending][1].strip().splitlines() if "exact may differ" not in line]
    assert (ends[ending][0], said[-1:]) == (status, [last_line] if last_line else []), said


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "neap-engine"}


def test_an_engine_that_is_dropped_ends_with_its_last_request(loaded) -> None:
    before = engine_threads()
    engine = Engine(loaded)
    [thread] = engine_threads() - before
    stopping = StoppingParams(max_tokens=20, ignore_eos=True)
    handle = engine.submit(GenerationRequest((1, 2), policy=DepthPolicy("full"), stopping=stopping))
    del engine
    gc.collect()
    assert sum(1 for _ in handle.events()) == 21
    assert thread.is_alive(), "the handle still holds the engine"
    del handle
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    wait_until(lambda: engine_threads() <= before)
