"""How many drafts are accepted where a request changes scores, beside one that does not: greedy, one at a time.

    python -m bench.scores --model FILE --router FOLDER [--per-task 1] [--max-tokens 64] [--drafts 4]

`full` and `exact` answer every prompt in every way, and must give the same tokens. `exact` makes so many drafts in
every pass, whether they pay or not, so that the figures do not depend on what else the machine does. The answers of
different ways are different texts, which repeat themselves more or less. Forbidden and biased are words that answers
often have.
"""

from bench.machine import described
from bench.options import add_dtypes, add_prompts, each_model, load, make_parser
from bench.prompts import first_turns
from bench.table import head, row
from shared.engine.engine import Engine
from shared.engine.request.request import Generation
from shared.ladder.folder import read_ladder
from shared.ladder.policy import DepthPolicy
from shared.model.loaded import LoadedModel
from shared.model.sampling import SamplingParams

WORDS = (" the", " and", " is", ".")


def ways(loaded: LoadedModel, max_tokens: int) -> dict[str, SamplingParams]:
    assert loaded.tokenizer is not None
    ids = [loaded.tokenizer(word, add_special_tokens=False)["input_ids"] for word in WORDS]
    return {
        "none": SamplingParams(),
        "presence_penalty 0.5": SamplingParams(presence_penalty=0.5),
        "frequency_penalty 0.3": SamplingParams(frequency_penalty=0.3),
        "repetition_penalty 1.1": SamplingParams(repetition_penalty=1.1),
        f"logit_bias -2 of {WORDS}": SamplingParams(logit_bias={own[0]: -2.0 for own in ids}),
        f"bad_words {WORDS}": SamplingParams(bad_words=tuple(map(tuple, ids))),
        f"min_tokens {max_tokens}": SamplingParams(min_tokens=max_tokens),
    }


def main() -> None:
    parser = make_parser(__doc__, router=True, many=True)
    add_prompts(parser, per_task=1)
    add_dtypes(parser)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--drafts", type=int, default=4)
    for options in each_model(parser):
        loaded = load(options)
        prompts = list(first_turns(loaded, options.prompts, options.per_task))
        print(described("cpu"))
        head("", "same tokens", "tokens", "accepted of drafted", "tokens per pass")
        policies = DepthPolicy("full"), DepthPolicy("exact", max_drafts=options.drafts)
        with Engine(loaded, read_ladder(options.router)) as engine:
            engine.warm_up()
            for name, sampling in ways(loaded, options.max_tokens).items():
                full, exact = (
                    [
                        engine.generate(ids, policy=policy, sampling=sampling, max_tokens=options.max_tokens)
                        for ids in prompts
                    ]
                    for policy in policies
                )
                print_row(name, full, exact)


def print_row(name: str, full: list[Generation], exact: list[Generation]) -> None:
    num_same = sum(a.token_ids == b.token_ids for a, b in zip(full, exact, strict=True))
    num_tokens = sum(len(one.token_ids) - 1 for one in exact)
    num_accepted = sum(one.stats.num_accepted for one in exact)
    num_drafted = sum(one.stats.num_drafted for one in exact)
    row(
        name,
        f"{num_same} of {len(exact)}",
        num_tokens,
        f"{num_accepted / num_drafted:.0%} of {num_drafted}",
        f"{num_tokens / sum(one.stats.num_verify_passes for one in exact):.2f}",
    )


if __name__ == "__main__":
    main()
