#!/usr/bin/env bash
# Streams one answer from the HTTP gateway: bash curl.sh http://127.0.0.1:8080 MODEL PROMPT
# The prompt stands in JSON as it is, so it must not contain quotes or backslashes.
set -euo pipefail

curl --no-buffer --silent --show-error --fail-with-body --max-time 60 "$1/v1/chat/completions" \
  --header 'Content-Type: application/json' \
  --data @- <<JSON
{
  "model": "$2",
  "messages": [{"role": "user", "content": "$3"}],
  "max_tokens": 32,
  "stream": true
}
JSON
