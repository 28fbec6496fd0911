"""Chat templates in Jinja's sandbox, with what transformers gives them.

The template is untrusted. `strftime_now` answers for one fixed day, so that a chat has the same ids on every day.

    template = Template({"format": 2, "template": text, "tokens": {"eos_token": "</s>"}, "date": "2026-01-01"})
    template.render([{"role": "user", "content": "Hi"}], asks=True)
    export_template(content)                                 # the text for `chat_template.jinja`, which keeps the day
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import date
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from raystride.pipelines.data.tokenizers.conversation import BEGIN, END, Messages, marks_answers

FORMAT = 2
"""2 encodes whole chats, as transformers does. Files of 0.3 have no format: their runs go on as they began."""
_DIRECTIVE = re.compile(r"%-?[aAbBdDeFHIjmMpSTuUwWxXyYZ]")
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Keys of a turn's thoughts; templates read the first, gpt-oss's the second."""
_FAILURES = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


class Generation(Extension):
    """The tag; in the output, BEGIN and END enclose its text."""

    tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        """Parses the block from the tag to `endgeneration`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_wrap_in_marks"), [], [], body).set_lineno(line)

    def _wrap_in_marks(self, caller: Callable[[], str]) -> str:
        return f"{BEGIN}{caller()}{END}"


class Template:
    """The compiled template of a chat file."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        """`content` is that of the chat file. Raises ValueError if the template is invalid."""
        self.text, self.tokens = content.get("marked") or content["template"], content["tokens"]
        self.marks_answers = marks_answers(self.text)
        self._is_earlier = is_earlier(content)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_template_error
        if "date" in content:
            environment.globals["strftime_now"] = date.fromisoformat(content["date"]).strftime
        try:
            self._compiled = environment.from_string(self.text)
        except TemplateError as error:
            raise ValueError(f"its chat template is none: {error}") from error

    def render(self, messages: Messages, tools: Sequence[Any] = (), *, asks: bool = False) -> str:
        """Returns the text of a chat, with `asks` and the header of the next answer; BEGIN and END enclose marked answers.

        Raises ValueError if the template refuses it.
        """
        values = {**self.tokens, "tools": tools or None, "add_generation_prompt": asks}
        if not self._is_earlier:
            values["documents"], messages = None, [_alias_thoughts(message) for message in messages]
        try:
            return self._compiled.render(messages=messages, **values)
        except _FAILURES as error:
            if not self._is_earlier and (as_sent := [_as_sent(message) for message in messages]) != messages:
                with suppress(*_FAILURES):  # DeepSeek's templates add arguments to a text, R1's asks for a content of null
                    return self._compiled.render(messages=as_sent, **values)
            raise ValueError(f"is refused by the chat template: {error}") from error


def is_earlier(content: Mapping[str, Any]) -> bool:
    """Returns whether a chat file is one of 0.3."""
    return int(content.get("format", 1)) < FORMAT


def needs_date(template: str) -> bool:
    """Returns whether a template asks for the day; one that was exported brings its own."""
    return "strftime_now" in template and "macro strftime_now" not in template


def export_template(content: Mapping[str, Any]) -> str:
    """Returns the template of a chat file for other programs: they would give it today's date, so a macro gives the day."""
    template: str = content["template"]
    if "date" not in content:
        return template
    day = date.fromisoformat(content["date"])
    directives = sorted({*_DIRECTIVE.findall(template)})
    replaced = "".join(f"|replace({name!r}, {day.strftime(name)!r})" for name in directives)
    # The line break is the tag's own: the template begins on a line of its own, as before.
    return f"{{% macro strftime_now(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}\n{template}"


def _alias_thoughts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    found = next((message[key] for key in THOUGHTS if message.get(key) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _as_sent(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a message with tool calls as OpenAI's API sends it: arguments are JSON texts, no content is a null."""
    if not isinstance(calls := message.get("tool_calls"), list):
        return message
    return {"content": None, **message, "tool_calls": [_with_text(call) for call in calls]}


def _with_text(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
        return call
    return {**call, "function": {**function, "arguments": _to_json(function["arguments"])}}


def _raise_template_error(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
