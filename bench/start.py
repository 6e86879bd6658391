"""How long a worker takes until it is ready, and the memory that it then has.

    python -m bench.start --model DIR [--starts 4] [--data-dir DIR]

Starts `python -m inference_service` with an empty registry, several times one after another, and asks for its health.
The first start finds nothing in the folder that starts remember things in; --data-dir keeps that folder. Seconds of a
processor (user and system) are the worker's own, so other work on the machine changes them little; seconds by the clock
are from the start of the process. A first answer is asked for as soon as the worker is ready: "token" is when its token
has come. Memory, once what follows a start is done, too: the most that was resident (VmHWM), and what is resident, of
which anonymous memory is the worker's own, and the rest is of mapped files. Linux only.
"""

import os
import tempfile
import time
from pathlib import Path

from neap_client.client import NeapClient
from neap_client.inference.v1 import inference_pb2

from bench.machine import described
from bench.options import each_model, make_parser
from bench.table import head, row
from bench.worker import MODEL_ID, READY_S, worker_process

COLUMNS = ("start", "ready, s", "processor, s", "token, s", "complete, s", "peak MB", "RSS MB", "anonymous")


def processor_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int, name: str) -> int:
    """A size of /proc/PID/status, such as VmHWM, in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (kib,) = (int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
    return kib * 1024 // 1_000_000


def wait_first_token(address: str) -> None:
    """Asks for an answer of one token, and waits for it."""
    stopping = inference_pb2.Stopping(max_tokens=1, ignore_eos=True)
    request = inference_pb2.GenerateRequest(model_id=MODEL_ID, text="Why is the sky blue?", stopping=stopping)
    with NeapClient(address) as client:
        assert len(client.answer(request).token_ids) == 1


def main() -> None:
    parser = make_parser(__doc__, many=True)
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--data-dir", type=Path, help="kept; without it, a temporary folder")
    for options in each_model(parser):
        print(described("cpu"))
        head(*COLUMNS)
        with tempfile.TemporaryDirectory() as temporary:
            folder = options.data_dir or Path(temporary)
            for number in range(1, options.starts + 1):
                began_s = time.monotonic()
                with worker_process(options.model, folder / "registry", folder / "log") as worker:
                    address = worker.wait_serving(READY_S)
                    ready_s, pid = time.monotonic() - began_s, worker.pid
                    used_s = processor_seconds(pid)
                    wait_first_token(address)
                    token_s = time.monotonic() - began_s
                    worker.wait_complete(READY_S)
                    complete_s = time.monotonic() - began_s
                    sizes = [memory_mb(pid, name) for name in ("VmHWM", "VmRSS", "RssAnon")]
                    row(number, f"{ready_s:.1f}", f"{used_s:.1f}", f"{token_s:.1f}", f"{complete_s:.1f}", *sizes)


if __name__ == "__main__":
    main()
