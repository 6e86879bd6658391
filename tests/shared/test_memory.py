"""Threads share the heaps of the C library."""

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, threading
from shared.memory import share_heaps
if {shares}:
    share_heaps()
libc, barrier = ctypes.CDLL(None), threading.Barrier(9)
def hold():
    libc.malloc(100_000)
    barrier.wait()
    barrier.wait()
for _ in range(8):
    threading.Thread(target=hold).start()
barrier.wait()
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
barrier.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc says how many heaps there are")
@pytest.mark.parametrize(("shares", "at_most"), [(True, 2), (False, 100)])
def test_threads_share_heaps(shares: bool, at_most: int) -> None:
    program = [sys.executable, "-c", PROGRAM.format(shares=shares)]
    done = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True)
    num_heaps = done.stdout.count("<heap nr=")
    assert (2 if shares else 8) <= num_heaps <= at_most
