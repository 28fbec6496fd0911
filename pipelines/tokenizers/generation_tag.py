"""`{% generation %}` in a chat template, as Hugging Face has it: what stands in it is what the assistant is trained on.

environment = ImmutableSandboxedEnvironment(extensions=[Generation])
environment.from_string("Q: a{% generation %}b{% endgeneration %}").render()    # "Q: a", BEGIN, "b", END
"""

from collections.abc import Callable

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from raystride.pipelines.tokenizers.conversation import BEGIN, END


class Generation(Extension):
    """The tag; in what is written, BEGIN and END stand around what is in it."""

    tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        """The block from the tag to `endgeneration`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{BEGIN}{caller()}{END}"
