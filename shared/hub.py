"""What huggingface_hub raises when the Hugging Face Hub cannot be asked."""

from huggingface_hub.errors import HfHubHTTPError

# The base of all errors of huggingface_hub's HTTP library. Its module differs between versions of huggingface_hub.
HTTP_ERROR: type[Exception] = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
