"""What a notebook shows of values: well-formed HTML that has the numbers of the text."""

from html.parser import HTMLParser

import pytest

from cute_sharding import explain, plan_redistribution, plan_reshard
from cute_sharding._html import ROWS, of_data, table
from cute_sharding.layout import Layout


class Cells(HTMLParser):
    """The text of each cell, and whether all that is opened is closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.cells, self.all = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.all.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


@pytest.mark.parametrize(
    "layout", [Layout((2, 3)), Layout(4, 2), Layout((2, (2, 2)), (1, (4, 2))), Layout(())]
)
def test_a_small_layout_is_its_values(layout):
    assert Cells(layout._repr_html_()).cells == [str(layout(i)) for i in range(layout.size)]


@pytest.mark.parametrize("text", ["(2,2,2):(4,2,1)", "(n,2):(2,1)", f"({ROWS + 1},2):(2,1)"])
def test_another_layout_is_its_text(text):
    assert Layout.parse(text)._repr_html_() == f"<code>{text}</code>"


def test_a_plan_is_a_table_of_its_steps():
    plan = plan_redistribution((700, 6), (2, 4), "S(0), S(1)", "S(1), S(0)")
    cells = Cells(plan._repr_html_()).cells
    for step in plan.to_dict()["steps"]:
        assert step["kind"] in cells and f"{step['received_elements']:,}" in cells
    assert f"{plan.peak_elements:,}" in cells


def test_the_plan_of_a_model_is_a_table_of_its_tensors():
    from cute_sharding import Spec

    source = {f"w{i}": Spec((8, 8), (4,), "S(0)") for i in range(ROWS + 3)}
    plan = plan_reshard(source, {name: Spec((8, 8), (4,), "S(1)") for name in source})
    cells = Cells(plan._repr_html_()).cells
    assert "w0" in cells and f"w{ROWS}" not in cells and "and 3 more" in cells


def test_what_is_explained_is_its_text():
    found = explain(shape=(4, 16), mesh=(4,), placements="S(1)", slice=(1, 1))
    assert "".join(Cells(found._repr_html_()).all) == str(found)


def test_text_is_escaped():
    assert Cells(table([("a < b & c", None, True)], ("<i>",))).cells == [
        "<i>",
        "a < b & c",
        "",
        "yes",
    ]
    assert "<script>" not in of_data("<script>", {"<script>": "<script>", "of": [{"<script>": 1}]})
