"""The table of chat templates in the documentation is what the templates do."""

import pytest

from tests.templates_page import BEGIN, END, PAGE, find_templates, write_table


def test_the_table_of_templates_says_what_they_do() -> None:
    pytest.importorskip("trl")
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert table == write_table(find_templates()), "python -m tests.templates_page writes it anew"
