"""Marks around the assistant's text for well-known templates that render an earlier turn differently once others follow.

A template is known by its SHA-256. Its copy renders the same text, with `{% generation %}` around what the assistant writes.

    marked = mark_known_template(template)                   # None: it is none of these, or other than it was published
    marked.family, marked.template
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class MarkedCopy(NamedTuple):
    """A template with marks."""

    family: str
    template: str


Edits = Sequence[tuple[str, str]]
"""Fragments of the original, each with the text that replaces it everywhere."""

_BEGIN, _END = "{% generation %}", "{% endgeneration %}"
_QWEN_HEADER = r"{{- '<|im_start|>' + message.role + '\n' }}" + _BEGIN


def _marks_of_qwen(before: str) -> Edits:
    """Returns the edits of a template of Qwen: the header goes before the case that writes thoughts, which ends `before`."""
    closing = r"        {{- '<|im_end|>\n' }}"
    return (
        (r"{{- '<|im_start|>' + message.role + '\n<think>\n' + ", r"{{- '<think>\n' + "),
        (r"{{- '<|im_start|>' + message.role + '\n' + content }}", "{{- content }}"),
        (before, _QWEN_HEADER + before),
        (
            f'{closing}\n    {{%- elif message.role == "tool" %}}',
            f'{closing}{_END}\n    {{%- elif message.role == "tool" %}}',
        ),
    )


_QWEN_3 = _marks_of_qwen("\n        {%- if loop.index0 > ns.last_query_index %}")
_QWEN_3_6 = _marks_of_qwen(
    "\n        {%- if (preserve_thinking is defined and preserve_thinking is true) or (loop.index0 > ns.last_query_index) %}"
)
_NEMOTRON_HEADER = r"{{- '<|im_start|>assistant\n' }}"
_NEMOTRON: Edits = (
    (r"{{- '<|im_start|>assistant\n' ~ ", _NEMOTRON_HEADER + _BEGIN + "{{- "),
    (r"trim) ~ '<|im_end|>\n' }}", r"trim) ~ '<|im_end|>\n' }}" + _END),
    (r"c ~ '<|im_end|>\n' }}", r"c ~ '<|im_end|>\n' }}" + _END),
    (r"{{- '<|im_start|>assistant\n<|im_end|>\n' }}", _NEMOTRON_HEADER + _BEGIN + r"{{- '<|im_end|>\n' }}" + _END),
    (f"{_NEMOTRON_HEADER}\n                {{%- set", f"{_NEMOTRON_HEADER}{_BEGIN}\n                {{%- set"),
    (
        "                {{- '<|im_end|>\\n' }}\n        {%- else %}",
        f"                {{{{- '<|im_end|>\\n' }}}}{_END}\n        {{%- else %}}",
    ),
)
# A turn of gpt-oss may have several messages, each with a header that the model writes.
_GPT_OSS: Edits = (
    (
        '        {%- if "tool_calls" in message %}\n            {#- We need',
        f'        {_BEGIN}\n        {{%- if "tool_calls" in message %}}\n            {{#- We need',
    ),
    ("\n    {%- elif message.role == 'tool' -%}", f"\n        {_END}\n    {{%- elif message.role == 'tool' -%}}"),
)
_DEEPSEEK: Edits = (
    ("{{'<｜Assistant｜><｜tool▁calls▁begin｜>", f"{{{{'<｜Assistant｜>'}}}}{_BEGIN}{{{{'<｜tool▁calls▁begin｜>"),
    ("{{'<｜Assistant｜>' + ", f"{{{{'<｜Assistant｜>'}}}}{_BEGIN}{{{{"),
    ("{{'<｜tool▁outputs▁end｜>' + ", f"{{{{'<｜tool▁outputs▁end｜>'}}}}{_BEGIN}{{{{"),
    ("{{'\\n' + '<｜tool▁call▁begin｜>'", f"{_BEGIN}{{{{'\\n' + '<｜tool▁call▁begin｜>'"),
    ("'<｜tool▁call▁end｜>'}}", f"'<｜tool▁call▁end｜>'}}}}{_END}"),
    ("+ '<｜end▁of▁sentence｜>'}}", f"+ '<｜end▁of▁sentence｜>'}}}}{_END}"),
    (
        "{{'<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'}}",
        f"{_BEGIN}{{{{'<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'}}}}{_END}",
    ),
)
_KNOWN: Mapping[str, tuple[str, Edits]] = {
    "a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8": ("Qwen3", _QWEN_3),
    "a4aee8afcf2e0711942cf848899be66016f8d14a889ff9ede07bca099c28f715": ("Qwen3.5", _QWEN_3),
    "273d8e0e683b885071fb17e08d71e5f2a5ddfb5309756181681de4f5a1822d80": ("Qwen3.5", _QWEN_3),
    "e84f32a23fdda27689f868aa4a1a5621f41133e51a48d7f3efcbea2839574259": ("Qwen3.6", _QWEN_3_6),
    "ab7813c3abdd9cb655905a410728b26c7884eca45ddfab8d9f931553485a7862": ("Nemotron 3 Nano", _NEMOTRON),
    "575fb74f54ed264df9047d0ecce3c98938aae953fb4f50356675706264cbb68a": ("Nemotron 3 Super", _NEMOTRON),
    "82753bef5cedc4932c1ed509b5c9a12be680fd86d1adb65bc3f7398d11c8eebc": ("Nemotron 3 Ultra", _NEMOTRON),
    "58933db77d3099b4f78c55a38347a72e1ea05b97d6bd8f38775303dc0194e0a9": ("Nemotron 3.5", _NEMOTRON),
    "a4c9919cbbd4acdd51ccffe22da049264b1b73e59055fa58811a99efbd7c8146": ("gpt-oss", _GPT_OSS),
    "56a1447ad31926fdc21fb07e56e5642bd9c850c4f52d8c8af7bbe5f079a84f5f": ("DeepSeek-R1-Distill", _DEEPSEEK),
    "563b1ce7d61d50a9b4c7439a912a1116f095b712df5b5e4d3e1116049874eb64": ("DeepSeek-V3", _DEEPSEEK),
}
"""By the SHA-256 of the original."""


def mark_known_template(template: str) -> MarkedCopy | None:
    """Returns the marked copy of a template that is known; None for any other."""
    known = _KNOWN.get(hashlib.sha256(template.encode()).hexdigest())
    if known is None:
        return None
    family, edits = known
    for fragment, marked in edits:
        template = template.replace(fragment, marked)
    return MarkedCopy(family, template)
