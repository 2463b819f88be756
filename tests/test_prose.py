"""How the pages are written: short paragraphs of one idea, the field's words, and guides that can
be read at one sitting. What stands in blocks and spans of code, and in tables, is not prose.
"""

import re

import pages
import pytest

# Pages for those who use the package, in the field's words.
FOR_USERS = (
    "README.md",
    *(
        f"docs/{name}.md"
        for name in (
            "index",
            "tutorial",
            "flags",
            "profiling",
            "tensor-parallel",
            "resharding",
            "refit",
            "inference",
            "troubleshooting",
            "lists/gallery",
        )
    ),
)
# In place of: shard, PyTorch, fallback.
REPLACED = ("cuts?", "stock", "gated")
MOST_WORDS = 80  # of a paragraph
MOST_WORDS_OF_A_PAGE = 3000


def prose(page: str) -> str:
    """The text of a page without code, tables, headings, HTML and the targets of links."""
    text = pages._FENCE.sub("", (pages.ROOT / page).read_text())
    text = re.sub(r"^>+ ?", "", text, flags=re.M)
    text = re.sub(r"^(\||#|<|!\[).*$", "", text, flags=re.M)
    text = re.sub(r"`[^`]*`", "CODE", text)
    return re.sub(r"\]\([^)]*\)", "]", text)


def paragraphs(page: str) -> list[str]:
    """Also the points of lists, each by itself."""
    blocks = re.split(r"\n\s*\n|^(?=\s*(?:[-*]|\d+\.) )", prose(page), flags=re.M)
    return [" ".join(block.split()) for block in blocks if block and block.strip()]


def test_prose_is_what_a_reader_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    text = "# A\n\nOne `code` [two](x.md).\n- three\n  four\n- five\n\n| six |\n"
    (tmp_path / "page.md").write_text(f"{text}\n```text\nseven\n```\n")
    assert paragraphs("page.md") == ["One CODE [two].", "- three four", "- five"]


@pytest.mark.parametrize("page", pages.PAGES)
def test_a_paragraph_is_one_idea(page):
    long = [text for text in paragraphs(page) if len(text.split()) > MOST_WORDS]
    assert not long, f"{page} has paragraphs of more than {MOST_WORDS} words: {long}"


@pytest.mark.parametrize("page", FOR_USERS)
def test_pages_for_users_have_the_words_of_the_field(page):
    found = [
        text
        for text in paragraphs(page)
        if re.search(rf"\b({'|'.join(REPLACED)})\b", text, re.IGNORECASE)
    ]
    assert not found, f"{page}: say shard, PyTorch or fallback: {found}"


@pytest.mark.parametrize("page", [page for page in pages.PAGES if "/lists/" not in page])
def test_a_page_is_read_at_one_sitting(page):
    assert len(prose(page).split()) <= MOST_WORDS_OF_A_PAGE


def test_the_readme_says_how_its_claims_are_shown():
    """Each section that has figures has the command that prints them."""
    for section in (pages.ROOT / "README.md").read_text().split("\n## ")[1:]:
        if re.search(r"\d (MB|ms|s|%)|\d%", section):
            shown = re.search(r"`python -m benchmarks\.|^\$ ", section, re.M)
            assert shown, section.splitlines()[0]
