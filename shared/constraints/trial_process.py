"""The program that compiles clients' grammars first: a process forked for each, with limits of time, memory and stack.

A grammar that recurses too deep, takes too long or too much memory ends its process alone, without an answer. The
program ends when its parent does. It knows llguidance and the tokenizer, and neither torch nor transformers.
"""

import json
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # started by its path, which is cheaper than to find the package
    sys.path[0] = str(Path(__file__).parents[2])

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from shared.constraints.schema import place_of_error

# Seconds of a processor for compiling. What people write takes milliseconds.
COMPILE_S = 2.0
# For finding where a refused schema is wrong, after that.
PLACE_S = 0.5
# Beyond what the process has.
MEMORY_BYTES = 128 << 20
# The share of the stack for a thread that compiles afterwards. Where the limit is infinite, glibc gives threads 2 MiB.
STACK_SHARE, USUAL_STACK_BYTES = 0.5, 2 << 20
NICENESS = 5
# How the library writes that a token may be chosen.
ALLOWED = 200


def serve(control: socket.socket, tokenizer: LLTokenizer) -> None:
    """Forks a process for each socket that comes through `control`, until that is closed."""
    while True:
        _, channels, _, _ = socket.recv_fds(control, 1, 1)
        if not channels:
            return
        with socket.socket(fileno=channels[0]) as channel:
            if os.fork() == 0:
                try:
                    control.close()
                    _answer(channel, tokenizer)
                finally:
                    os._exit(0)


def _answer(channel: socket.socket, tokenizer: LLTokenizer) -> None:
    """Reads a request, and writes a line to say that it begins, and a line of JSON: `error`, empty if the grammar can
    be compiled and begun, whether it `is_limit`, and the bytes that it takes. Then, perhaps, another one with the
    `field` of the request that has the error, and the `place` in it."""
    stack_bytes = resource.getrlimit(resource.RLIMIT_STACK)[0]
    if stack_bytes == resource.RLIM_INFINITY:
        stack_bytes = USUAL_STACK_BYTES
    _limit(resource.RLIMIT_STACK, int(STACK_SHARE * stack_bytes))
    with channel.makefile("rwb") as stream:
        request = json.load(stream)
        limits = LLParserLimits(**request["limits"], verbose_errors=False)

        def tried(grammar: str) -> tuple[LLMatcher, bool]:
            """What it is compiled to, and whether it is: its first token, which can take longest, may be an error."""
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
            if matcher.is_error():
                return matcher, False
            allowed = matcher.compute_logit_bias()
            token = allowed.find(ALLOWED)
            while token in tokenizer.eos_tokens:
                token = allowed.find(ALLOWED, token + 1)
            if token >= 0 and not matcher.is_error():
                matcher.consume_token(token)
            return matcher, True

        tried(LLMatcher.grammar_from_regex("a"))  # so that what every compilation touches is not counted
        in_use, before = _memory_bytes()
        _limit(resource.RLIMIT_AS, in_use + MEMORY_BYTES)
        stream.write(b"\n")
        stream.flush()
        signal.setitimer(signal.ITIMER_PROF, COMPILE_S)  # its signal ends the process
        matcher, is_limit = tried(request["grammar"])
        why = matcher.get_error()
        _write(stream, error=why, is_limit=is_limit, num_bytes=max(_memory_bytes()[1] - before, 0))
        if not why:
            return
        end_s = time.process_time() + PLACE_S

        def error_of(schema: str) -> str:
            if time.process_time() > end_s:
                return ""
            grammar = LLMatcher.grammar_from_json_schema(schema, request["json_options"])
            return LLMatcher(tokenizer, grammar, log_level=0, limits=limits).get_error()

        for field, schema in request["schemas"]:
            if problem := error_of(schema):
                _write(stream, error=problem, field=field, place=place_of_error(schema, problem, error_of))
                return


def _write(stream: Any, **answer: Any) -> None:
    stream.write(json.dumps(answer).encode() + b"\n")
    stream.flush()


def _limit(what: int, limit: int) -> None:
    resource.setrlimit(what, (limit, resource.getrlimit(what)[1]))


def _memory_bytes() -> tuple[int, int]:
    """What this process has reserved, and what of it is in memory."""
    if sys.platform != "linux":
        import psutil

        usage = psutil.Process().memory_info()
        return usage.vms, usage.rss
    pages = Path("/proc/self/statm").read_text().split()
    return int(pages[0]) * resource.getpagesize(), int(pages[1]) * resource.getpagesize()


def main() -> None:
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what is forked
    _limit(resource.RLIMIT_CORE, 0)
    with socket.socket(fileno=int(sys.argv[1])) as control:
        serve(control, LLTokenizer(**json.load(sys.stdin)))


if __name__ == "__main__":
    main()
