"""Chat templates that write tools as those of well-known models do, and a tiny model that has one of them."""

from shared.chat.channels import TOKENS
from shared.model.loaded import LoadedModel, wrap_model
from tests.constrained import MERGES, VOCABULARY_SIZE
from tests.worker import build_model, build_tokenizer

# Qwen2.5, Hermes: a tag around each call.
HERMES = """
{%- if tools %}{{ '[tools]' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<eos>' }}{% endif %}
{%- for m in messages %}
{{- '[' ~ m.role ~ '] ' ~ m.content }}
{%- for c in m.tool_calls or [] %}
{{- '\\n' if m.content or not loop.first }}{{- '<tool_call>\\n{"name": "' ~ c.function.name ~ '", "arguments": ' }}
{{- c.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}{{ '<eos>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"""
# Llama 3.1: no tag, one call, other names.
LLAMA = """
{%- for m in messages %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one at once') }}{% endif %}
{%- set f = m.tool_calls[0].function %}
{{- '[assistant] {"name": "' ~ f.name ~ '", "parameters": ' }}{{ f.arguments | tojson }}{{ '}<eos>' }}
{%- else %}
{{- '[tools]' ~ (tools | tojson) if tools and loop.first }}{{ '[' ~ m.role ~ '] ' ~ m.content ~ '<eos>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"""
# Mistral: a special token before a list, ids that the model makes up, no text for the role, tools at the last question.
MISTRAL = """
{%- for m in messages %}
{%- if m.role == 'user' %}
{{- '[AVAILABLE_TOOLS]' ~ (tools | tojson) if tools and loop.last }}{{ '[INST] ' ~ m.content ~ '[/INST]' }}
{%- elif m.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}
{{- (c.function | tojson)[:-1] ~ ', "id": "' ~ c.id ~ '"}' ~ (']<eos>' if loop.last else ', ') }}
{%- endfor %}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' ~ m.content ~ '[/TOOL_RESULTS]' }}
{%- else %}{{ ' ' ~ m.content ~ '<eos>' }}{% endif %}{%- endfor %}"""
# DeepSeek: arguments as text, in a block of code.
DEEPSEEK = """
{%- for t in tools or [] %}{{ t | tojson }}{% endfor %}
{%- for m in messages %}
{{- '<' ~ m.role ~ '>' ~ m.content }}
{%- for c in m.tool_calls or [] %}
{{- '<calls>' if loop.first else '\\n' }}
{{- '<call>function<sep>' + c.function.name + '\\n```json\\n' + c.function.arguments + '\\n```</call>' }}
{{- '</calls>' if loop.last }}
{%- endfor %}{{ '<eos>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""
# Qwen3: as HERMES; the model thinks in tags, unless it is told not to.
THINKING = (
    HERMES
    + """{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}"""
)
# DeepSeek-R1: the prompt has begun to think.
IN_THOUGHT = HERMES + "{% if add_generation_prompt %}{{ '<think>\\n' }}{# </think> #}{% endif %}"
# gpt-oss: messages in channels, one call, reasoning under another name and not beside a text with calls.
CHANNELS = """
{%- macro said(header, text) %}{{ '<|start|>' ~ header ~ '<|message|>' ~ text ~ '<|end|>' }}{% endmacro %}
{{- said('developer', tools | tojson) if tools }}
{%- for m in messages %}
{%- if m.tool_calls %}
{%- if m.content and m.thinking %}{{ raise_exception('content and thinking') }}{% endif %}
{%- set thought = m.thinking or m.content %}
{{- said('assistant<|channel|>analysis', thought) if thought }}
{%- set f = m.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' ~ f.name ~ '<|channel|>commentary json<|message|>' }}
{{- f.arguments | tojson }}{{- '<eos>' }}
{%- elif m.role == 'assistant' %}{{ said('assistant<|channel|>final', m.content) }}
{%- elif m.role == 'tool' %}{{ said('functions to=assistant<|channel|>commentary', m.content | tojson) }}
{%- else %}{{ said(m.role, m.content) }}{% endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
# Neither JSON nor a place for the name.
MARKUP = HERMES.replace("c.function.arguments | tojson", "c.function.arguments | length")
TEMPLATES = {
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "thinking": THINKING,
    "in thought": IN_THOUGHT,
}
# And with messages in channels, which another parser reads.
WAYS = {**TEMPLATES, "channels": CHANNELS}


def build_chat_model(template: str, *, seed: int = 0, own_tokens: bool = False) -> LoadedModel:
    """`own_tokens`: tags are tokens of their own, that of Mistral a special one."""
    tokenizer = build_tokenizer(MERGES)
    if own_tokens:
        thinking = ["<think>", "</think>"] if "</think>" in template else []
        tokenizer.add_tokens(["<tool_call>", "</tool_call>", *thinking])
        tokenizer.add_tokens(["[TOOL_CALLS]"], special_tokens=True)
    if template == CHANNELS:
        tokenizer.add_tokens([*TOKENS], special_tokens=True)
    tokenizer.chat_template = template
    assert len(tokenizer) <= VOCABULARY_SIZE
    return wrap_model(build_model(seed, VOCABULARY_SIZE), tokenizer, model_id="tiny", accelerate=True)
