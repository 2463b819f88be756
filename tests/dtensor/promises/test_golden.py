"""What ops do is what the golden table says: a fixed share of its cases here, all of them in
make thorough; and how differences are told.
"""

import pytest
from golden import rows, table
from golden.measured import lines_of

OTHER = table.of_another_release()
pytestmark = pytest.mark.skipif(OTHER is not None, reason=str(OTHER))

ONE_OF = 60

AGAIN = (
    "python -m tests.golden shows all lines that have changed, and --write puts them in the table"
)


def test_a_share_of_the_table():
    some = {*table.names()[::ONE_OF], *rows.not_compared()}
    report = table.differences(table.read(), {name: lines_of(name) for name in some}, whole=False)
    assert report == table.SAME, f"{report}\n{AGAIN}"


@pytest.mark.costly
def test_the_whole_table():
    report = table.differences(table.read(), table.measured(table.names(), workers=2))
    assert report == table.SAME, f"{report}\n{AGAIN}"


def test_the_table_is_written_as_it_is_read(monkeypatch, tmp_path):
    wanted = table.TABLE.read_text()
    found = table.read()
    monkeypatch.setattr(table, "TABLE", tmp_path / "table.txt")
    table.write(found)
    assert table.TABLE.read_text() == wanted
    assert list(found) == table.names()


@pytest.mark.parametrize(
    ("now", "told"),
    [
        ("S0 -> S1 (1 all_to_all_single: 20 B)", "fewer bytes: 1"),
        ("S0 -> R (1 all_reduce: 40 B)", "other collectives, as many bytes: 1"),
        ("S0 -> S0 (1 all_gather_into_tensor: 40 B)", "other placements, as many bytes: 1"),
        (
            "S0 -> R (1 all_gather_into_tensor: 30 B); gradients: S0 (1 all_reduce: 20 B)",
            "more bytes: 1",
        ),
        ("S0 -> RuntimeError: no", "new errors: 1"),
        ("S0 -> R (1 all_gather_into_tensor: 40 B)", table.SAME),
    ],
)
def test_differences_are_grouped(now, told):
    before = ["op f: float32[4]", "  2 rows: S0 -> R (1 all_gather_into_tensor: 40 B)"]
    after = [before[0], f"  2 rows: {now}"]
    assert told in table.differences({"op f": before}, {"op f": after})


def test_cases_that_come_and_go_are_told():
    report = table.differences({"op f": ["op f: int64[4]"]}, {"op g": ["op g: int64[4]"]})
    assert "cases that are gone: 1\n  op f" in report
    assert "cases that are new: 1\n  op g" in report
