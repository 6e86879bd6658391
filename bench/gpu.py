"""On a GPU: full depth against the card's bandwidth, and `exact` against full depth. (Ops alone: `bench.roofline`.)

    python -m bench.gpu [--shape llama-3.1-8b] [--depth 0 2] [--batch 1 8 32] [--rounds 3] [--share 0.8] [--keys 32]

The model has the shape's sizes, random bfloat16 weights, and exits whose agreement is set by construction
(`bench.imposed`). So the figures show the speed at a given acceptance rate, not the acceptance rate that a trained
router reaches. Rates cover decoding alone: from the time when every request has its first token until the first request
ends. Policies take turns within a round; reported are medians over rounds. `floor`: the time to read the weights of one
pass, at the rate of a copy within the device's memory measured in the same run (a copied byte counts twice). `--device
cpu --shape tiny` only checks that the program works.
"""

import gc
import statistics
import sys
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from bench.answers import EngineAnswer, answer_all
from bench.imposed import SHAPES, Imposed, impose
from bench.machine import described
from bench.options import add_device, make_parser, parsed
from bench.peers.figures import batch_decoding_rate
from bench.stopwatch import medians_s
from bench.table import head, row
from shared import ops
from shared.engine.engine import Engine
from shared.ladder.policy import DepthPolicy
from shared.model.weights.lazy import lazy

PROMPT_TOKENS = 32
MAX_TOKENS = 192
COPIED_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of all matrices that a pass over one token reads, as they are packed; of experts those of its share."""
    found = 0.0
    for module in model.modules():
        for weight in () if isinstance(module, nn.Embedding) else module._parameters.values():
            if weight is None or weight.dim() < 2:
                continue
            own = lazy(weight)
            num_bytes = weight.nbytes if own is None else sum(packed.nbytes for packed in own.memory)
            is_of_experts = weight.dim() == 3
            found += num_bytes * (model.config.num_experts_per_tok / len(weight) if is_of_experts else 1)
    return int(found)


def copy_bytes_per_s(device: str, rounds: int = 9) -> float:
    """Bytes read plus written per second by a copy within the device's memory, the median of `rounds`."""
    source = torch.ones(COPIED_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()

    return 2 * source.numel() / medians_s({"": copy}, rounds, 2)[""]


def measured(answers: list[EngineAnswer]) -> tuple[float, float, list[list[int]]]:
    """(tokens per second while all decode, mean tokens per verify pass, answers)."""
    depths = [answer.finished.depth for answer in answers if answer.finished is not None]
    per_pass = statistics.fmean(own.num_tokens / max(own.num_verify_passes, 1) for own in depths)
    return batch_decoding_rate([answers]), per_pass, [answer.token_ids for answer in answers]


def compare(
    imposed: Imposed, batches: list[int], rounds: int, num_keys: int = PROMPT_TOKENS
) -> dict[int, dict[str, float]]:
    """Prints a row for each number of requests at once, exact and full in turns, after `num_keys` tokens. Returns their
    figures."""
    found: dict[int, dict[str, float]] = {}
    most = max(batches)
    depths = "+".join(str(layer_exit.depth) for layer_exit in imposed.ladder.exits)
    full, exact = DepthPolicy("full"), DepthPolicy("exact")
    with Engine(imposed.loaded, imposed.ladder, max_running=most, max_queue=most) as engine:
        engine.warm_up()
        print(f"passes {engine.runner.description}", file=sys.stderr, flush=True)
        answer = partial(answer_all, engine, max_tokens=MAX_TOKENS, ignore_eos=True)
        for batch in batches:
            figures, is_same = [], True
            for index in range(rounds + 1):  # the first warms up
                # Other prompts each round, so that none matches a cached prefix of an earlier round.
                first = 1000 * index + 7 * batch
                prompts = [imposed.prompt(first + 50 * i, num_keys) for i in range(batch)]
                full_rate, _, expected = measured(answer(prompts, full))
                exact_rate, per_pass, answers = measured(answer(prompts, exact))
                is_same &= answers == expected
                figures.append((full_rate, exact_rate, exact_rate / full_rate, per_pass))
            one, other, ratio, passes = map(statistics.median, zip(*figures[1:], strict=True))
            cells = f"{one:.1f}", f"{other:.1f}", f"{ratio:.2f}", f"{passes:.2f}"
            row(depths, batch, *cells, "yes" if is_same else "NO")
            found[batch] = {
                "full": one, "exact / full": ratio, "tokens per pass": passes, "differ": not is_same,
            }  # fmt: skip
    return found


def depths_of(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("+")))


def free(device: str) -> None:
    """Releases unused memory. The collector is needed because a gate and its layer refer to each other."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    parser = make_parser(__doc__, model=False)
    add_device(parser)
    parser.set_defaults(device="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument(
        "--depth", type=depths_of, nargs="+", default=[(0,), (2,)], metavar="D or D+D",
        help="of exits; each its own ladder",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--share", type=float, default=0.8, help="of tokens where exits are right")
    parser.add_argument("--keys", type=int, default=PROMPT_TOKENS, help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=3)
    options = parsed(parser)
    device = options.device
    if device == "cuda" and not ops.runs_on("cuda"):
        parser.error("neap's kernels are not built for CUDA: run python -m shared.ops.build first")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    speed = copy_bytes_per_s(device)
    free(device)  # a later small tensor could take a piece of the large block and keep it
    print(f"{described(device)}; a copy within memory: {speed / 1e9:.0f} GB/s, read and written")
    print(f"{options.shape}, {dtype}, an exit that is right at {options.share:.0%} of tokens")
    head("exits at", "requests", "full tokens/s", "exact", "exact / full", "tokens per pass", "same")  # fmt: skip
    for depths in options.depth:
        imposed = impose(SHAPES[options.shape], depths, options.share, device=device, dtype=dtype)
        num_bytes = weight_bytes(imposed.loaded.model)
        found = compare(imposed, options.batch, options.rounds, options.keys)
        del imposed
        free(device)
    if 1 in found:
        floor_s = num_bytes / speed
        print(
            f"\nfull depth alone: {num_bytes / 1e9:.2f} GB a pass, floor {floor_s * 1000:.2f} ms, "
            f"{found[1]['full'] * floor_s:.0%} of it reached"
        )


if __name__ == "__main__":
    main()
