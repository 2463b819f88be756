"""Pictures as files and in notebooks; and what is said where a library is missing."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cute_sharding import draw
from cute_sharding.sharding import Sharding, parse_placements
from cute_sharding.tools.drawing.picture import WIDE

ROOT = Path(__file__).parents[3]
PICTURES = {
    "tensor": lambda: draw(Sharding((5, 7), (2, 3), parse_placements("S(0),S(1)"))),
    "view": lambda: draw(Sharding((4, 6), (4,), parse_placements("S(1)")), view=(24,)),
    "redistribution": lambda: draw(Sharding((8, 8), (2, 4), parse_placements("S(0),P")), to="R,R"),
    "scalar": lambda: draw(Sharding((), (2,), parse_placements("R"))),
    "empty": lambda: draw(Sharding((0, 3), (2,), parse_placements("S(0)"))),
    "panels": lambda: draw(Sharding((4, 2, 3, 5), (2, 2), parse_placements("S(0),_S(3,2)"))),
    "large": lambda: draw(Sharding((1 << 20, 1 << 20), (512, 64), parse_placements("S(0),S(1)"))),
}


def texts_of(root):
    return [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("name", PICTURES)
def test_svg_is_well_formed_and_names_every_device(name):
    picture = PICTURES[name]()
    texts = texts_of(ElementTree.fromstring(picture.svg()))
    cells = {
        cell.label
        for section in picture.sections
        for panel in section.panels
        for row in panel.cells
        for cell in row
    }
    assert cells - {""} <= set(texts)
    for key in picture.legend:
        assert key.label in texts
        assert key.text in " ".join(texts)
    assert picture.title in " ".join(texts)


@pytest.mark.parametrize("name", PICTURES)
def test_text_stays_on_the_page(name):
    """By the width that the font has, and no two texts of a line in the same place."""
    root, lines = ElementTree.fromstring(PICTURES[name]().svg()), {}
    wide, high = map(float, root.get("viewBox").split()[2:])
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        x, y = float(text.get("x")), float(text.get("y"))
        assert x >= 0 and x + len(text.text) * WIDE <= wide and 0 <= y <= high, text.text
        lines.setdefault(round(y), []).append((x, x + len(text.text) * WIDE, text.text))
    for line in lines.values():
        for (_, stop, one), (start, _, other) in pairwise(sorted(line)):
            assert stop <= start + 1e-2, f"{one!r} runs into {other!r}"


def test_the_same_picture_makes_the_same_svg():
    one, other = PICTURES["view"](), PICTURES["view"]()
    assert one == other and one is not other
    assert one.svg() == other.svg()
    assert "<dc:date>" not in one.svg()


def test_files_by_suffix(tmp_path):
    picture = PICTURES["tensor"]()
    assert picture.save(tmp_path / "a.svg").read_text() == picture.svg()
    assert picture.save(str(tmp_path / "a.png")).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert picture.save(tmp_path / "a.txt").read_text() == f"{picture}\n"


def test_a_notebook_shows_the_svg():
    picture = PICTURES["view"]()
    assert ElementTree.fromstring(picture._repr_svg_()).tag.endswith("svg")
    html = picture._repr_html_()
    assert ElementTree.fromstring(html)[0].tag.endswith("svg")  # no doctype within the page
    assert texts_of(ElementTree.fromstring(html)) == texts_of(ElementTree.fromstring(picture.svg()))


@pytest.mark.parametrize(
    "library, use",
    [("rich", use) for use in ("str(picture)", "picture.show()", "picture.save('a.txt')")]
    + [("matplotlib", use) for use in ("picture._repr_svg_()", "picture.save('a.png')")],
)
def test_a_missing_library_is_named(library, use, tmp_path):
    code = f"""
import sys
sys.modules[{library!r}] = None
from cute_sharding import draw
from cute_sharding.sharding import Replicate, Sharding
picture = draw(Sharding((4,), (2,), (Replicate(),)))
repr(picture)
try:
    {use}
except ImportError as error:
    assert {library!r} in str(error) and 'pip install "cute-sharding[draw]"' in str(error), error
else:
    sys.exit("nothing was raised")
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_the_extra_that_the_error_names_is_there():
    text = (ROOT / "pyproject.toml").read_text()
    assert 'name = "cute-sharding"' in text
    assert 'draw = ["rich' in text


def test_a_picture_is_made_without_the_libraries():
    code = (
        "import sys; from cute_sharding import draw; from cute_sharding.sharding import *; "
        "draw(Sharding((4,), (2,), (Shard(0),)), to='R'); "
        "sys.exit(bool({'torch', 'rich', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60).returncode == 0
