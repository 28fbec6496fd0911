"""The tag `{% generation %}` of chat templates, as in Hugging Face: the assistant is trained on the text inside it.

environment = ImmutableSandboxedEnvironment(extensions=[Generation])
environment.from_string("Q: a{% generation %}b{% endgeneration %}").render()    # "Q: a", BEGIN, "b", END
"""

from collections.abc import Callable

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from raystride.pipelines.tokenizers.conversation import BEGIN, END


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
