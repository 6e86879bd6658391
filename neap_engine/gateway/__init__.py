"""An HTTP gateway with OpenAI's API in front of the workers. It holds no state, no model and no tokenizer."""
