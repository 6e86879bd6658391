"""All output of a service's process becomes log lines."""

import json
import subprocess
import sys

PROGRAM = """
import asyncio, logging, sys, threading, warnings
handler = logging.StreamHandler()  # as transformers makes one when it is imported
logging.getLogger("library").addHandler(handler)
logging.getLogger("library").propagate = False
from shared.rpc.logs import configure_logging
from shared.rpc.service_logs import log_all_output, log_stdout
log_all_output()
configure_logging("info")
log_stdout()
from tqdm import tqdm
for _ in tqdm(range(3), desc="Loading weights"):
    pass
tqdm(total=3, disable=False).update(1)
logging.getLogger("library").warning("from a library")
logging.getLogger("library").info("not worth a line")
logging.getLogger("shared.x").info("from a module of ours")
logging.getLogger("shared.x").debug("below the level")
warnings.warn("a warning")
print("printed")
sys.stderr.write("half a line")
sys.stderr.write(" and the rest\\nwithout end")
def fail(what):
    raise RuntimeError(what)
thread = threading.Thread(target=fail, args=("in a thread",))
thread.start()
thread.join()
async def failing():
    asyncio.get_running_loop().call_soon(fail, "in a callback")
    await asyncio.sleep(0.01)
asyncio.run(failing())
class Bad:
    def __del__(self):
        fail("unraisable")
Bad()
fail("in the main thread")
"""


def test_every_line_is_json_whatever_code_writes_it():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert all({"event", "level", "timestamp"} <= set(line) for line in lines)
    text = done.stderr
    for expected in (
        "from a library",
        "from a module of ours",
        "a warning",
        "printed",
        "half a line and the rest",
        "without end",
        "in a thread",
        "in a callback",
        "unraisable",
        "in the main thread",
    ):
        assert text.count(expected) >= 1, expected
    for unwanted in ("Loading weights", "not worth a line", "below the level"):
        assert unwanted not in text
