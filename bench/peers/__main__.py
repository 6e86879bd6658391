"""Speed and memory of neap beside other engines, on a CPU, in one run.

    python -m bench.peers [--model DIR] [--gguf FILE] [--ours float32 gguf] [--peer llama.cpp:float32,Q8_0 openvino]
    [--rounds 3]

Linux only. Without `--model`: the demo's model in float32, and as `--gguf` its file. A .gguf file as
`--model` is measured as it is: `--ours gguf --peer llama.cpp:gguf`, without a reference. Each peer is set up once in an
environment of its own under the cache folder, with pinned versions; llama.cpp is compiled for this machine, which takes
minutes (`--build-jobs`). Peers are not dependencies of neap. Set-up and conversions go on where a killed run stopped.
`--set-up-only` ends there.

Every engine runs in a worker process with `--threads` threads, pinned to the same CPUs. It is stopped (SIGSTOP) while
another engine is measured. For each prompt all engines take turns, in an order that rotates. Greedy, at most
`--max-tokens` tokens, no reuse of earlier keys and values. Figures are medians over rounds:

- one request, decoding: tokens/s from the first token to the last, over all prompts of a round.
- N at once: tokens/s of N requests that are submitted together, prompts included, until all have ended; and, of the
  same, while all are decoding. They are the prompts with the longest answers. HF `generate` gets them as one padded
  batch.
- same tokens: answers to single requests, of all rounds, with the tokens of the reference: Hugging Face float32, or
  what is measured first where there is none.
- ready: from the start of the process to the end of the first short answer, with the files in the page cache.
  RSS: after all rounds.
- with `--read 512 2048`, instead: seconds until the first token of a prompt of so many tokens.
- with `--context 4096 16384`, instead: tokens/s of one request while decoding, after a document of so many tokens
  (`bench.peers.contexts`), whose keys and values are reused.
- full / it and exact / it: neap's tokens/s over this engine's, with the same format of weights. Engines that keep
  weights in bfloat16 round inputs to it, too, so they are compared with bfloat16-products of ours if that was measured.

A peer that cannot be set up or fails is left out, named below the table, and makes the exit status 1.
"""

import argparse
import os
import signal
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import platformdirs
from transformers import AutoTokenizer, GenerationConfig

from bench.machine import described
from bench.options import make_parser, parsed
from bench.peers.catalogue import FLOAT32, OURS, PEERS, REFERENCE, USUAL, Choice, parse_choices
from bench.peers.contexts import QUESTION_TOKENS, print_rates, questions
from bench.peers.dequantised import float32_folder
from bench.peers.engines.serving import EngineSettings
from bench.peers.figures import print_table
from bench.peers.models import Models, environments
from bench.peers.run import Planned, contenders_of, first_tokens, measure, start
from bench.peers.worker import EngineFailed
from bench.prompts import DEFAULT_FILE, read_texts
from bench.table import head, row
from demo.model import demo_model
from shared.errors import InvalidInput, NeapError
from shared.model.weights.gguf import GgufReaders
from shared.model.weights.reading import CheckpointFiles, replaced

ROUTER = Path(__file__).parents[1] / "router"


def say(line: str) -> None:
    print(line, flush=True)


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__, model=False)
    text = "Hugging Face folder or .gguf file; default: the demo's model in float32"
    parser.add_argument("--model", type=Path, help=text)
    parser.add_argument("--gguf", type=Path, help="a .gguf file of the model, for the format gguf")
    parser.add_argument("--data-dir", type=Path, default=Path(".neap"), help="of the demo's model")
    parser.add_argument("--ours", nargs="*", default=[FLOAT32], help=", ".join(PEERS[OURS].weights))
    parser.add_argument("--peer", nargs="*", default=list(USUAL), help=f"NAME[:FORMAT,...]: {', '.join(PEERS)}")
    parser.add_argument("--router", type=Path, default=ROUTER, help="packed ladder, for exact; none: look-up alone")
    parser.add_argument("--prompts", type=Path, default=DEFAULT_FILE, help="JSON lines")
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="requests at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--read", type=int, nargs="+", default=[], help="only time first tokens after so many tokens")
    parser.add_argument("--context", type=int, nargs="+", default=[], help="only time decoding after so many tokens")
    parser.add_argument("--cache", type=Path, default=platformdirs.user_cache_path("neap-bench"))
    parser.add_argument("--build-jobs", type=int, default=1, help="compilers at once")
    parser.add_argument("--set-up-only", action="store_true")
    options = parsed(parser)
    try:
        has_reference = options.model is None or options.model.is_dir()
        options.choices = chosen(options.ours, options.peer, has_reference=has_reference)
    except InvalidInput as error:
        parser.error(error.message)
    if options.num_prompts < 1 or options.rounds < 1 or options.batch < 1:
        parser.error("--num-prompts, --rounds and --batch must be at least 1")
    if not 1 <= options.threads <= len(os.sched_getaffinity(0)):
        parser.error(f"--threads must be 1 to {len(os.sched_getaffinity(0))}")
    return options


def chosen(ours: list[str], peers: list[str], *, has_reference: bool = True) -> list[Choice]:
    """All workers, the reference first. Raises `InvalidInput`."""
    found = [Choice(REFERENCE, FLOAT32)] if has_reference else []
    for text in [*(f"{OURS}:{weights}" for weights in ours), *peers]:
        found += parse_choices(text)
    return list(dict.fromkeys(found))


def planned_workers(options: argparse.Namespace, failures: dict[str, str]) -> tuple[list[list[int]], list[Planned]]:
    """(token ids of each prompt, the workers that can be started). Those that cannot are added to `failures`."""
    cache: Path = options.cache.absolute()
    given = options.gguf and options.gguf.absolute()
    if options.model is None:
        fetched = demo_model(options.data_dir.absolute(), say)
        model = float32_folder(fetched, cache / "models", say)
        given = given or fetched
    else:
        model = options.model.absolute()
    if model.is_file():
        given = model
        with CheckpointFiles(None) as checkpoint, replaced(GgufReaders(checkpoint).replacements):
            tokenizer = AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
        end = tokenizer.eos_token_id
    else:
        tokenizer = AutoTokenizer.from_pretrained(model)
        end = GenerationConfig.from_pretrained(model).eos_token_id
    texts = read_texts(options.prompts, options.num_prompts)
    prompts = [encode(tokenizer, text) for text in texts]
    options.asked = {length: questions(tokenizer, partial(encode, tokenizer), length) for length in options.context}
    end_ids = [] if end is None else [end] if isinstance(end, int) else end
    longest = max([*map(len, prompts), *options.read, *(length + QUESTION_TOKENS for length in options.context)])
    found = environments(cache, options.build_jobs)
    models = Models(model, given, cache / "models", found, say)
    planned = []
    for choice in options.choices:
        peer, environment = choice.peer, found.get(choice.name)
        try:
            if environment is not None:
                environment.ensure(say)
            source = str(models.source(choice))
            title = models.title(choice.weights)
        except NeapError as error:
            failures[f"{peer.title} {choice.weights}"] = error.message
            say(f"left out: {error.message}")
            continue
        has_router = choice.name == OURS and str(options.router) != "none"
        router = str(options.router.absolute()) if has_router else ""
        sizes = (options.threads, 1 if options.context else options.batch, longest + options.max_tokens, tuple(end_ids))
        settings = EngineSettings(source, choice.weights, *sizes, router, peer.modes, bool(options.context))
        command = [str(environment.python) if environment else sys.executable, "-m", peer.module]
        planned.append(Planned(peer.title, title, command, settings))
    return prompts, planned


def encode(tokenizer: Any, text: str) -> list[int]:
    """As a chat of one message, or as plain text for a model without a template."""
    if not tokenizer.chat_template:
        return list(tokenizer(text)["input_ids"])
    messages = [{"role": "user", "content": text}]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    return list(encoded["input_ids"])


def main() -> None:
    options = parse()
    # A run that is told to end ends its workers and removes half-made conversions.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # The workers inherit the CPUs that they may use, and the number of threads of any OpenMP runtime.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    failures: dict[str, str] = {}
    prompts, planned = planned_workers(options, failures)
    if not options.set_up_only:
        with ExitStack() as stack:
            started = start(stack, planned, options.cache.absolute() / "logs", failures, say)
            if not started or started[0][0] is not planned[0]:
                sys.exit("the reference, which is measured first, does not run")
            sizes = (options.max_tokens, options.batch, options.rounds)
            try:
                if options.context:
                    contenders = contenders_of(started, options.max_tokens)
                    print_rates(contenders, options.asked, options.rounds, failures, say)
                elif options.read:
                    answering = contenders_of(started, 1)
                    seconds = first_tokens(answering, prompts, options.read, options.rounds, failures, say)
                else:
                    rows = measure(started, prompts, *sizes, failures, say)
            except EngineFailed as error:
                sys.exit(f"no reference answers: {error.message}")
        say(f"\n{described('cpu')}; {len(prompts)} prompts, {options.rounds} rounds")
        if options.read:
            head("seconds until the first token", *(f"of {length} tokens" for length in options.read))
            for name, own in seconds.items():
                row(name, *(f"{each:.2f}" for each in own))
        elif not options.context:
            print_table(rows, options.batch, rows[0].name)
    for name, why in failures.items():
        say(f"{name} failed: {why}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
