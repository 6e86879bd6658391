"""AIPerf, a load generator: chats, streamed and whole, several at once, with the tokens that the server counts."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

url, fields = sys.argv[1:]
NUM_REQUESTS = 12
prompts = Path("prompts.jsonl")
prompts.write_text('{"text": "hello"}\n' * 4)
# It loads a tokenizer, which no count comes from, and would fetch its own from the network. Offline it reads no folder.
PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())).save_pretrained("tokenizer")
environment = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
command = [str(Path(sys.executable).with_name("aiperf")), "profile", "--url", url, "--extra-inputs", fields]
command += f"""--model tiny --endpoint-type chat --concurrency 4 --request-count {NUM_REQUESTS} --ui none
    --input-file {prompts} --custom-dataset-type single_turn --use-server-token-count
    --tokenizer {Path("tokenizer").absolute()}""".split()
for streaming in ([], ["--streaming"]):
    out = Path(f"out{len(streaming)}")
    subprocess.run([*command, *streaming, "--output-artifact-dir", str(out)], check=True, env=environment, timeout=300)
    found = json.loads((out / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == NUM_REQUESTS, found
    assert found.get("error_request_count", {"avg": 0})["avg"] == 0, found
    assert found["output_sequence_length"]["min"] >= 1, found
    assert ("time_to_first_token" in found) == bool(streaming), found
