"""The gallery: its pictures are small and fresh, and its text says what was measured."""

import importlib.util
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def gallery():
    spec = importlib.util.spec_from_file_location("gallery", DOCS / "generate_gallery.py")
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "gallery", module)
        spec.loader.exec_module(module)
        yield module


def test_thirteen_patterns_with_a_small_picture_each(gallery):
    assert len(gallery.PATTERNS) == 13
    page = (DOCS / "lists" / "gallery.md").read_text()
    for p in gallery.PATTERNS:
        path = DOCS / "gallery" / f"{p.name}.svg"
        assert path.stat().st_size < 60_000
        ElementTree.parse(path)
        assert f"](../gallery/{p.name}.svg)" in page


def test_a_change_is_noticed(gallery, tmp_path, monkeypatch):
    assert gallery.out_of_date() == []
    for name, value in (("PAGE", tmp_path / "gallery.md"), ("FOLDER", tmp_path)):
        monkeypatch.setattr(gallery, name, value)
    gallery.PAGE.write_text((DOCS / "lists" / "gallery.md").read_text().replace("tp=4", "tp=8"))
    for p in gallery.PATTERNS:
        svg = (DOCS / "gallery" / f"{p.name}.svg").read_text()
        changed = svg.replace("rank 1", "rank 9") if p.name == "merge" else svg
        (tmp_path / f"{p.name}.svg").write_text(changed)
    (tmp_path / "old.svg").write_text("")
    assert gallery.out_of_date() == [
        str(tmp_path / name) for name in ("gallery.md", "merge.svg", "old.svg")
    ]


def test_the_pictures_agree_with_what_was_measured(gallery):
    outcomes = json.loads((DOCS / "gallery" / "measured.json").read_text())["outcomes"]
    kinds = set()
    for p in gallery.PATTERNS:
        ours, torchs = outcomes[p.name]["ours"], outcomes[p.name]["torch"]
        kinds.add(torchs.split(":")[0].split()[0])
        assert "wrong" not in ours
        if p.view is None:
            continue
        picture = p.picture()
        is_free = not any(text.startswith("not free") for text in picture.captions)
        after = picture.sections[1].title
        assert ours == f"free: {after.split(' as ')[1]}" if is_free else "communicates" in ours
    assert kinds == {"free", "communicates", "raises", "wrong"}
