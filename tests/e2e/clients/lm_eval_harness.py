"""lm-eval: a task that generates over chats, and one of log-probabilities over completions, with the tokenizer of the
gateway."""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"OPENAI_API_KEY": "unused", "HF_DATASETS_CACHE": str(Path("cache").absolute())}

import lm_eval
from lm_eval.tasks import TaskManager

url = sys.argv[1]
data = Path("data.jsonl").absolute()
rows = [{"q": "hello", "choices": ["a", "b"], "gold": gold} for gold in (0, 1)]
data.write_text("".join(json.dumps(row) + "\n" for row in rows))
shared = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(data)}},
    "test_split": "test",
    "doc_to_text": "{{q}}",
}


def figures(model: str, path: str, task: dict[str, Any], **fields: Any) -> dict[str, Any]:
    given = {"model": "tiny", "base_url": f"{url}{path}", "num_concurrent": 2, "max_retries": 1, **fields}
    asked = {**shared, **task, "task": "mine"}
    found = lm_eval.simple_evaluate(
        model=model,
        model_args=given,
        tasks=[asked],
        task_manager=TaskManager(include_defaults=False),
        apply_chat_template=model == "local-chat-completions",
    )
    return dict(found["results"]["mine"])


generating = {"output_type": "generate_until", "doc_to_target": "x", "metric_list": [{"metric": "exact_match"}]}
generating["generation_kwargs"] = {"until": ["\n"], "max_gen_toks": 8}
assert figures("local-chat-completions", "/v1/chat/completions", generating)["exact_match,none"] == 0
choosing = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{gold}}"}
choosing["metric_list"] = [{"metric": "acc"}]
remote = {"tokenizer_backend": "remote", "tokenized_requests": False}
# The same question twice, of which one answer is right.
assert figures("local-completions", "/v1/completions", choosing, **remote)["acc,none"] == 0.5
