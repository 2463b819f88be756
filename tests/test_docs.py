"""The pages a user reads are true: their examples and commands run, their links lead somewhere, the
generated one is what the code says, and every error, flag and public name is on its page.
"""

import doctest
import importlib
import importlib.util
import inspect
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path

import gloo
import messages
import pages
import pytest

import cute_sharding
from cute_sharding._settings import TABLE
from cute_sharding.dtensor.bookkeeping.versions import release

ROOT = pages.ROOT
PACKAGE = ROOT / "cute_sharding"

# Commands that are not run, by how they begin, and why. Of those of make and of the benchmarks it
# is tested that they exist.
NOT_RUN = {
    "pip install": "make dist installs the wheel in an empty environment",
    "make ": "they run the tests, or take minutes",
    "python -m benchmarks.": "they take minutes",
}


# -- examples --------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", pages.PAGES)
def test_blocks_say_what_they_are(page):
    for block in pages.blocks(page):
        where = f"{page}:{block.line}"
        if block.language in pages.NOT_RUN:
            assert not re.search(r"^(\$|>>>|python |make |pip |torchrun )", block.text, re.M), (
                f"{where} looks like code: say that it is console or pycon, so that it is run"
            )
        else:
            assert block.language in ("console", "diff", "pycon", "python"), where
            is_doctest = block.text.startswith(">>>")
            assert block.language != "pycon" or is_doctest, where
            assert block.language != "python" or is_doctest or block.title, (
                f"{where}: begin with >>>, or give it a title and a command that runs it"
            )


@pytest.mark.parametrize("page", pages.PAGES)
def test_programs_are_run_by_a_command(page):
    for name in pages.programs(page):
        assert any(name in command.text for command in pages.commands(page)), name


DOCTESTS = [page for page in pages.PAGES if ">>>" in (ROOT / page).read_text()]


def test_pages_have_examples():
    counts = {
        page: len(doctest.DocTestParser().get_examples((ROOT / page).read_text()))
        for page in DOCTESTS
    }
    few = ("docs/how-it-works.md", "docs/redistribution.md", "docs/ops.md", "docs/refit.md")
    assert all(counts[page] >= 4 for page in few), counts


# Pages that have a process group of their own: each in a process.
GROUPED = [page for page in DOCTESTS if ">>> torch.distributed.init" in (ROOT / page).read_text()]


@pytest.mark.parametrize("page", [page for page in DOCTESTS if page not in GROUPED])
def test_examples_run(page):
    run_examples(page)


@pytest.mark.parametrize("page", GROUPED)
def test_examples_with_a_process_group_run(page):
    gloo.spawn(run_in_a_process, 1, page)


def run_in_a_process(rank, page):
    warnings.simplefilter("ignore")
    os.chdir(ROOT)
    run_examples(page)


def run_examples(page):
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    names, said = {}, []
    try:
        for block in pages.blocks(page):
            if block.text.startswith(">>>"):
                test = doctest.DocTestParser().get_doctest(
                    block.text, names, page, str(ROOT / page), block.line - 1
                )
                runner.run(test, out=said.append, clear_globs=False)
                names = test.globs
    finally:
        cute_sharding.disable()
    assert runner.tries and not runner.failures, "".join(said)


COMMANDS = [(page, command) for page in pages.PAGES for command in pages.commands(page)]


RUN = [c for c in COMMANDS if not c[1].text.startswith(tuple(NOT_RUN))]


def name_of(value):
    return value if isinstance(value, str) else str(value.line)


@pytest.mark.parametrize(("page", "command"), [c for c in RUN if c[0] == "README.md"], ids=name_of)
@pytest.mark.processes
@pytest.mark.costly
def test_commands_of_the_readme_do_what_they_say(page, command, site):
    assert_does_what_it_says(page, command, site)


@pytest.mark.parametrize(("page", "command"), [c for c in RUN if c[0] != "README.md"], ids=name_of)
@pytest.mark.processes
@pytest.mark.costly
@pytest.mark.one_in(24)
def test_commands_do_what_they_say(page, command, site):
    assert_does_what_it_says(page, command, site)


# Programs for other packages, which run where these are installed.
NEEDED = {"from_transformers.py": ("transformers",), "with_accelerate.py": ("accelerate",)}

# Commands that print what torch's own rules receive and hold, which is other on other releases:
# there they have to succeed, no more.
OF_ONE_RELEASE = (2, 13)
OF_TORCHS_RULES = (" estimate ", " plan-step ", "tensor_parallel.py", "train.py", "tour.py")


def assert_does_what_it_says(page, command, site):
    for program, packages in NEEDED.items():
        for package in packages if program in command.text else ():
            pytest.importorskip(package)
    if release() != OF_ONE_RELEASE and any(word in command.text for word in OF_TORCHS_RULES):
        command = command._replace(output="")
    # Without what pytest says of each test, or no command would be one that has run before.
    kept = {k: v for k, v in os.environ.items() if "CUTE" not in k and k != "PYTEST_CURRENT_TEST"}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**kept, "PYTHONPATH": site, "PATH": path, "OMP_NUM_THREADS": "1"}
    said = pages.complaint(command, page, environment)
    assert not said, said


def _others():
    """Commands that are not run, of blocks and of the text: (page, command)."""
    for page, command in COMMANDS:
        yield page, command.text
    for page in pages.PAGES:
        text = pages._FENCE.sub("", (ROOT / page).read_text())
        for found in re.findall(r"`((?:make|python -m) [^`]+)`", text):
            yield page, " ".join(found.split())


@pytest.mark.parametrize("target", sorted({c.split()[1] for _, c in _others() if c[:5] == "make "}))
def test_targets_of_make_exist(target):
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "command", sorted({c for _, c in _others() if c.startswith("python -m ")} | {"python -m torch"})
)
def test_modules_and_their_options_exist(command):
    module, *arguments = shlex.split(command)[2:]
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    if module.startswith("benchmarks"):
        source = Path(spec.origin).read_text()
        for option in (argument for argument in arguments if argument.startswith("-")):
            assert f'"{option}"' in source, f"{module} has no {option}"


# -- links, and what the site has ------------------------------------------------------------------


def anchors(path):
    """Those of a page's headings, as mkdocs and GitHub make them."""
    headings = re.findall(r"^#+ (.*)$", pages._FENCE.sub("", path.read_text()), re.M)
    words = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[\s-]+", "-", each) for each in words}


@pytest.mark.parametrize("page", pages.PAGES)
def test_links_lead_somewhere(page):
    text = pages._FENCE.sub("", (ROOT / page).read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:|mailto:", target):
            continue
        name = target.partition("#")[0] or Path(page).name
        path = (ROOT / page).parent / name
        assert path.exists(), f"{page} links to {target}"
        anchor = target.partition("#")[2]
        if anchor and path.suffix == ".md" and "/reference/" not in str(path):
            assert anchor in anchors(path), f"{page} links to {target}"
        if page.startswith("docs/"):  # the site has nothing else
            assert (ROOT / "docs") in path.resolve().parents, f"{page} links out of docs/: {target}"


@pytest.mark.parametrize("page", pages.PAGES)
def test_brackets_are_no_links(page):
    """`[one][other]` is a link to what other pages call `other`, and the site is not built without
    one: words in brackets have a backslash before the second.
    """
    prose = pages._FENCE.sub("", (ROOT / page).read_text())
    assert re.findall(r"(?<!\\)\]\[[^\]]*\]", re.sub(r"`[^`\n]*`", "", prose)) == []


@pytest.mark.parametrize("page", pages.PAGES)
def test_images_say_what_they_show(page):
    text = (ROOT / page).read_text()
    assert not re.findall(r"!\[\s*\]\(", text) and "<img" not in text.replace("<img alt=", "")


def test_the_site_has_every_page():
    """mkdocs itself is asked by make docs; this is what needs nothing installed."""
    lines = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].splitlines()
    listed = {
        match[1] for line in lines if (match := re.match(r"\s*- [^#]*: ([\w/-]+\.md)$", line))
    }
    assert all((ROOT / "docs" / name).exists() for name in listed)
    ours = {page.removeprefix("docs/") for page in pages.PAGES if page.startswith("docs/")}
    assert ours == listed


@pytest.mark.parametrize(
    "name",
    [
        "",
        "layout",
        "sharding",
        "propagation",
        "exchange",
        "exchange.meshes",
        "relations",
        "relations.table",
        "dtensor",
    ],
)
def test_the_reference_has_every_public_name(name):
    module = ".".join(filter(None, ["cute_sharding", name]))
    page = (ROOT / "docs/reference" / f"{name.rpartition('.')[2] or 'index'}.md").read_text()
    said = re.findall(r"^::: ([\w.]+)$", page, re.M)
    public = set(importlib.import_module(module).__all__)
    if name == "dtensor":  # most are those of the package, whose page has them
        public -= set(cute_sharding.__all__)
    assert sorted(path.rpartition(".")[2] for path in said) == sorted(public)
    for path in said:
        at, _, each = path.rpartition(".")
        found = getattr(importlib.import_module(at), each)
        assert found is getattr(importlib.import_module(module), each), path
        # The site reads sources: of a module and a function of one name it would take the module.
        places = (path, f"cute_sharding.dtensor.{each}") if not name else (path,)
        for place in places if not inspect.ismodule(found) else ():
            same = at == module and (PACKAGE.parent / f"{place.replace('.', '/')}.py").exists()
            assert not same, f"{path} is a module as well: say {path}.{each}"


def test_a_reader_has_few_pages():
    """All but the reference and the lists, which are looked up. A page more is one less to be read
    by anybody: put what is new where it belongs.
    """
    assert len(list((ROOT / "docs").glob("*.md"))) <= 16


@pytest.mark.parametrize("page", ["rules", "patches", "tutorial"])
def test_generated_pages_are_up_to_date(page, monkeypatch):
    """Of the gallery: tools/drawing/test_gallery.py."""
    path = str(ROOT / f"docs/generate_{page}.py")
    monkeypatch.setattr(sys, "argv", [path, "--check"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(path, run_name="__main__")
    assert not ended.value.code


def test_the_page_of_measured_ops_is_that_of_its_data():
    ops = importlib.import_module("benchmarks.ops")
    data = json.loads(ops.DATA.read_text())
    assert ops.DATA.read_text() == ops.as_json(data)
    assert ops.DATA.with_suffix(".md").read_text() == ops.page(data)
    assert len(data["ops"]) > 100 and set(data["totals"]) == set(ops.KINDS)
    script = (ROOT / "docs/lists/measured-ops.js").read_text()
    assert all(f'"{name}"' in script for name in ("stock", "ours", "measured-ops"))


# -- messages and flags ----------------------------------------------------------------------------

# Messages that no program meets: what raises them is caught by us, or is checked before. By how
# they begin, each with the reason.
INTERNAL = {
    "a symbolic size outside of symbols_of(...)": "ours to open",
    "sizes of one name in … may differ in another call": "by_signature catches it and logs it",
    "results of shapes … are not what … says": "by_signature catches it and logs it",
}


@cache
def all_messages():
    return messages.messages(PACKAGE)


def test_messages_are_read_from_the_source(tmp_path):
    assert len(all_messages()) > 100
    texts = {message.text for message in all_messages()}
    for text in (
        "shape … has a negative size",
        "the signature … has no ->",
        messages.OWN_WORDS["Undecided"],
        "cute_sharding is not switched on, because of …. The program runs with PyTorch's own "
        "rules. For details, run `python -m cute_sharding status`.",
    ):
        assert text in texts
    source = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    for function, (_, words) in messages.BUILT.items():
        assert f"def {function}(" in source and words in re.sub(r'"\s*f?"', "", source)
    (tmp_path / "new.py").write_text("def f(x):\n    raise ValueError(' '.join(x))\n")
    with pytest.raises(LookupError, match=r"what does ' '\.join"):
        messages.messages(tmp_path)


def test_every_message_is_explained():
    page = messages.normal((ROOT / "docs/lists/messages.md").read_text())
    missing = [
        f"{message.where}: {message.text}"
        for message in all_messages()
        if message.beginning(100) not in page and message.text not in INTERNAL
    ]
    assert not missing, f"docs/lists/messages.md has not: {missing}"


def test_no_other_message_is_explained():
    """What the page explains is said by something."""
    known = [messages.normal(message.text) for message in all_messages()]
    text = (ROOT / "docs/lists/messages.md").read_text().partition("## Flags")[2]
    listed = re.findall(r"^- (?:`` (.*?) ``|`(.*)`)\s*$", text, re.M)
    assert len(listed) > 100
    for said in (messages.normal(one or other) for one, other in listed):
        assert any(message.startswith(said) for message in known), said


def test_internal_messages_exist():
    assert set(INTERNAL) <= {message.text for message in all_messages()}


def test_every_flag_has_a_section():
    found = {
        flag
        for path in PACKAGE.rglob("*.py")
        for flag in re.findall(r'"(USE_CUTE_\w+)"', path.read_text())
    }
    assert len(found) >= 5
    page = (ROOT / "docs/flags.md").read_text()
    assert {*re.findall(r"^## `(USE_CUTE_\w+)`", page, re.M)} == found


def test_the_table_of_flags_is_that_of_the_settings():
    rows = re.findall(
        r"^\| `(USE_CUTE_\w+)` \| `(\w+)` \| (.*) \|$", (ROOT / "docs/flags.md").read_text(), re.M
    )
    assert sorted(rows) == sorted(
        (setting.flag, name, setting.by_default) for name, setting in TABLE.items()
    )


# -- what is said of the package in more than one place --------------------------------------------


def test_the_changelog_begins_with_this_version():
    first = re.search(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert first[1] == cute_sharding.__version__


def test_the_version_stands_in_one_place():
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()
    files = [*ROOT.glob("*.toml"), *ROOT.glob("*.cff"), *PACKAGE.rglob("*.py")]
    places = [path.name for path in files if cute_sharding.__version__ in path.read_text()]
    assert places == ["__init__.py"]


def test_the_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 120
