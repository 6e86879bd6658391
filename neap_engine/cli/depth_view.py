"""Prints a stream of tokens. The colour of a token shows the depth at which it left."""

from dataclasses import dataclass, field

from neap_client.inference.v1 import inference_pb2 as pb
from rich.console import Console
from rich.text import Text

FULL = "full"
# From the shallowest exit to the deepest. Tokens of the full model keep the terminal's default colour.
SHADES = ("bright_green", "green", "cyan", "bright_blue", "blue", "magenta", "bright_magenta")
FULL_STYLE = "default"


def proposer_colour(proposer: str, depth: int, num_layers: int) -> str:
    """Return the colour of a proposer by its depth. Exits before the first layer are green."""
    if proposer == FULL:
        return FULL_STYLE
    if depth == 0:
        return SHADES[0] if proposer == "prompt-lookup" else SHADES[1]
    return SHADES[min(2 + depth * 5 // max(num_layers, 1), len(SHADES) - 1)]


@dataclass
class DepthView:
    """Prints chunks as they arrive and counts tokens for the legend. `num_layers` is the model's depth L."""

    console: Console
    num_layers: int
    coloured: bool
    counts: dict[tuple[str, int], int] = field(default_factory=dict)
    _pending: list[tuple[str, int]] = field(default_factory=list)

    def show(self, event: pb.GenerateResponse) -> None:
        """Print the text of an event.

        Text may lag behind tokens, because one character may span two tokens. A chunk of several tokens does not say
        which token wrote which text, so all its text has the colour of the deepest token.
        """
        for token in event.chunk.tokens:
            key = (token.proposer, token.exit_depth)
            self.counts[key] = self.counts.get(key, 0) + 1
            self._pending.append(key)
        text = event.chunk.text + event.finished.text
        if not text:
            return
        style = FULL_STYLE
        if self.coloured and self._pending:
            proposer, depth = max(self._pending, key=lambda key: key[1])
            style = proposer_colour(proposer, depth, self.num_layers)
        self._pending.clear()
        self.console.print(Text(text, style=style), end="")

    def legend(self) -> Text:
        """Return one line with every proposer that was used, in its colour, and the number of tokens that left
        there."""
        line = Text("left at: ")
        order = sorted(self.counts.items(), key=lambda item: (item[0][1], item[0][0]))
        for (proposer, depth), count in order:
            style = proposer_colour(proposer, depth, self.num_layers)
            line.append(f"{proposer} ({depth}/{self.num_layers}) {count}", style=f"bold {style}")
            line.append("  ")
        return line
