"""A tiny Llama, briefly trained to count upwards so that exits have something to learn."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from shared.model.loaded import LoadedModel, wrap_model

WORDS = [f"w{i}" for i in range(24)]
SPECIAL = ["<bos>", "<eos>", "<user>", "<bot>", "<unk>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<user> ' if m['role'] == 'user' else '<bot> ' }}{{ m['content'] }} "
    "<eos> {% endfor %}{% if add_generation_prompt %}<bot> {% endif %}"
)


def make_tokenizer(chat: bool = True) -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(SPECIAL + WORDS)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.decoder = decoders.WordPiece(prefix="##")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>",
        additional_special_tokens=["<user>", "<bot>"],
    )  # fmt: skip
    if chat:
        tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(
    chat: bool = True,
    seed: int = 0,
    with_tokenizer: bool = True,
    accelerate: bool = True,
    weights: dict[str, torch.Tensor] | None = None,
) -> LoadedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    # After word i comes word i + 1, or i + 2 where the word before was even: two tokens of context matter.
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if weights is not None:
        model.load_state_dict(weights)
    for _ in range(60 if weights is None else 0):
        rows = [torch.randint(5, 29, (16,)), torch.randint(5, 29, (16,))]
        for _ in range(14):
            step = 1 + (rows[-2] % 2 == 0).long()
            rows.append((rows[-1] - 5 + step) % 24 + 5)
        tokens = torch.stack(rows, 1)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    tokenizer = make_tokenizer(chat) if with_tokenizer else None
    return wrap_model(model, tokenizer, model_id="counting", accelerate=accelerate)


@pytest.fixture(scope="session")
def counting() -> LoadedModel:
    return make_model()


@pytest.fixture(scope="session")
def base_model() -> LoadedModel:
    """Without a chat template."""
    return make_model(chat=False)
