"""What an answer must be, as a request says it."""

from dataclasses import dataclass, field

from shared.chat.formats import CallFormat
from shared.constraints.schema import fitted
from shared.errors import InvalidInput
from shared.field_types import check_types

FORMS = ("json_schema", "regex", "lark", "choice", "json_object")
MAX_BYTES = 64 * 1024
# The limit of the schemas of all tools together.
MAX_TOOL_BYTES = 4 * MAX_BYTES


@dataclass(frozen=True)
class Constraint:
    """Exactly one form is set. `json_schema`: the schema as JSON. `regex`: it matches the whole answer. `lark`: a
    grammar in llguidance's variant of Lark. `choice`: the answer is one of these. `json_object`: any JSON object.

    `strict`: a schema of which something cannot be enforced is refused; otherwise that is left out, and `unenforced`
    has its places. Raises `InvalidInput` (reason CONSTRAINT_INVALID).
    """

    json_schema: str | None = None
    regex: str | None = None
    lark: str | None = None
    choice: tuple[str, ...] | None = None
    json_object: bool = False
    strict: bool = False
    unenforced: tuple[str, ...] = field(default=(), init=False, compare=False)

    def __post_init__(self) -> None:
        check_types(self, "CONSTRAINT_INVALID")
        forms = self._forms
        if len(forms) != 1:
            listed = " and ".join(forms) or "nothing"
            raise invalid(f"a constraint has exactly one form; this one has {listed}", "constraint")
        if self.choice is not None and not self.choice:
            raise invalid("a choice has at least one text", self.field)
        texts = self.choice or [getattr(self, self.form)]
        num_bytes = sum(len(text.encode(errors="replace")) for text in texts if text is not True)
        if num_bytes > MAX_BYTES:
            raise invalid(f"it has {num_bytes} bytes; at most {MAX_BYTES} are allowed", self.field)
        if self.json_schema is not None:
            schema, unenforced = fitted(self.json_schema, is_strict=self.strict)
            object.__setattr__(self, "json_schema", schema)
            object.__setattr__(self, "unenforced", tuple(f"{self.field}: {place}" for place in unenforced))

    @property
    def _forms(self) -> list[str]:
        return [name for name in FORMS if getattr(self, name) not in (None, False)]

    @property
    def schemas(self) -> list[tuple[str, str]]:
        """Where in a request a JSON Schema is, and the schema."""
        return [] if self.json_schema is None else [(self.field, self.json_schema)]

    @property
    def form(self) -> str:
        """The name of the field that is set."""
        return self._forms[0]

    @property
    def field(self) -> str:
        """That field, as a request names it."""
        return f"constraint.{self.form}"


@dataclass(frozen=True)
class MessageConstraint:
    """What the answer to a chat must be: reasoning, then text, then calls of tools. The text is free, or what `answer`
    allows.

    `thinking`: the tags of reasoning, which has begun if `in_thought`; None: there is none. `calls`: how calls are
    written; None: there are none. `tools`: by name, the JSON Schema of the arguments, which is strict for
    `strict_tools`. `must_call`: there is a call, and no text. `may_repeat`: whether there may be several. `named`: the
    only tool that may be called; empty: all may. `channels`: the answer is written as `shared.chat.channels` says,
    without tags, and goes on with a text if `in_text`. `unenforced` as in `Constraint`. Raises `InvalidInput` (reason
    CONSTRAINT_INVALID).
    """

    thinking: tuple[str, str] | None = None
    in_thought: bool = False
    answer: Constraint | None = None
    calls: CallFormat | None = None
    tools: tuple[tuple[str, str], ...] = ()
    must_call: bool = False
    may_repeat: bool = True
    strict_tools: frozenset[str] = frozenset()
    named: str = ""
    channels: bool = False
    in_text: bool = False
    unenforced: tuple[str, ...] = field(default=(), init=False, compare=False)

    def __post_init__(self) -> None:
        sizes = {where: len(schema.encode(errors="replace")) for where, schema in self.schemas}
        for where, most in [*dict.fromkeys(sizes, MAX_BYTES).items(), ("tools", MAX_TOOL_BYTES)]:
            num_bytes = sizes.get(where, sum(sizes.values()))
            if num_bytes > most:
                raise invalid(f"it has {num_bytes} bytes; at most {most} are allowed", where)
        unenforced: list[str] = []
        tools = list(self.tools)
        for i, name, schema in self.callable_tools:
            fitting, places = fitted(schema, is_strict=name in self.strict_tools)
            tools[i] = name, fitting
            unenforced += [f"tools[{i}].parameters: {place}" for place in places]
        object.__setattr__(self, "tools", tuple(tools))
        object.__setattr__(self, "unenforced", (*unenforced, *(self.answer.unenforced if self.answer else ())))

    @property
    def callable_tools(self) -> list[tuple[int, str, str]]:
        """Place, name and schema of those that may be called."""
        return [(i, name, schema) for i, (name, schema) in enumerate(self.tools) if self.named in ("", name)]

    @property
    def schemas(self) -> list[tuple[str, str]]:
        """Where in a request each JSON Schema is, and the schema."""
        of_tools = [(f"tools[{i}].parameters", schema) for i, _, schema in self.callable_tools]
        return of_tools + (self.answer.schemas if self.answer else [])

    @property
    def field(self) -> str:
        return self.answer.field if self.answer else "tools"


def invalid(why: str, field: str) -> InvalidInput:
    """The error for a constraint that nobody can follow. `field`: where in the request."""
    return InvalidInput(f"{field}: {why}", reason="CONSTRAINT_INVALID", metadata={"field": field})
