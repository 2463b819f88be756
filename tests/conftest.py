"""Shared by all tests; its place also puts this folder on the path, for `import enumeration`."""

import gc
import os
import re
import subprocess
from collections import defaultdict
from pathlib import Path
from zlib import crc32

import pytest
from processes import search_path

REPOSITORY = Path(__file__).parent.parent

# Of each test's parameters, make test runs one in so many of those in tests/dtensor, and pytest
# says how many it has left out: they compile and start processes, and on a slow machine all of
# them take hours. make thorough, each night, and make releases run all, make quick fewer.
ADAPTER, ONE_IN = REPOSITORY / "tests" / "dtensor", 30

# Tests marked ``costly`` compute for five seconds or more, the most because they start processes or
# compile. Of them make test runs one in so many, and its last lines say which. (Those in a file
# that share what takes long have one name in their mark, and all run or none.)
COSTLY_ONE_IN = 12

# torch.compile asks in every process which vector instructions there are, and builds and loads a
# library for each. That the machine says so is enough.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# What there is to compile is small: a process of its own for it takes longer to start.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Two files run at once on two cores, and some start processes: a second thread of one, which waits
# for work busily, takes a core from another (a tenth of the time of tests that compute).
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Compilers, and imports of torch, make many objects that stay: to look through them less often
# saves a twentieth of the time. (Objects, and collections of younger ones.)
COLLECTED_AFTER = 100_000, 20, 100
gc.set_threshold(*COLLECTED_AFTER)

# Files that may take half a minute of computing or more, by what is drawn.
LONGEST = (
    "test_ranks_in_step.py",
    "test_stack.py",
    "test_processes.py",
    "test_compiled_order.py",
    "test_models.py",
    "test_compiled.py",
    "test_patches_of_images.py",
    "test_compiled_programs.py",
    "test_docs.py",
    "test_no_history.py",
    "test_autoload.py",
    "test_transformer.py",
    "test_imports.py",
    "test_cluster.py",
    "test_status.py",
    "test_cli_in_and_out.py",
)


def pytest_addoption(parser):
    parser.addoption(
        "--one-in",
        type=int,
        metavar="N",
        help=f"run one in N of each test's parameters; by default all, in {ADAPTER.name}/ one in "
        f"{ONE_IN}; what is named with :: runs in any case",
    )
    parser.addoption(
        "--salt",
        default=commit(),
        help="what else draws depend on, so that runs do not all look at the same tests; by "
        "default the commit",
    )


def commit():
    """The one that is checked out; nothing where that is not known."""
    command = ["git", "-C", str(REPOSITORY), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def pytest_report_header(config):
    salt = config.getoption("--salt")
    return f"draws of tests: --salt {salt or repr(salt)}"


def by_draw(config):
    """The order in which things are drawn, as a key to sort their names by."""
    salt = config.getoption("--salt")
    return lambda name: crc32(f"{salt} {name}".encode())


def pytest_collection_modifyitems(config, items):
    """Which ones run is a matter of their names and the salt, and of tests with the same parameters
    the same ones: what they set up is then needed for these alone.

    The longest files come first, as the files are dealt out to several workers in order.
    """
    items.sort(key=lambda item: [*LONGEST, item.path.name].index(item.path.name))
    named = {Path(each.partition("::")[0]).resolve() for each in config.args if "::" in each}
    tests = defaultdict(list)
    for item in items:
        if item.path not in named:
            tests[item.path, getattr(item, "originalname", item.name)].append(item)
    asked, left_out = config.getoption("--one-in"), set()
    if asked != 1:
        left_out |= {item for some in tests.values() for item in some if is_long(item)}
        left_out |= costly_left_out([i for some in tests.values() for i in some], by_draw(config))
    for (path, _), parameters in tests.items():
        mark = parameters[0].get_closest_marker("one_in")
        by_place = ONE_IN if ADAPTER in path.parents else 1
        one_in = asked or (mark.args[0] if mark else by_place)
        parameters = [item for item in parameters if item not in left_out]
        alike = defaultdict(list)
        for item in parameters:
            alike[drawn_by(item)].append(item)
        drawn = sorted(alike, key=by_draw(config))
        left_out |= {item for name in drawn[-(-len(drawn) // one_in) :] for item in alike[name]}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def costly_left_out(items, key):
    """Those of the costly tests that are not of the set that is drawn. What stands side by side is
    in different sets, so that each set has some of every folder.
    """
    costly = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("costly")
        if mark is not None and not is_long(item):
            together = mark.args[0] if mark.args else getattr(item, "originalname", item.name)
            costly[str(item.path), together].append(item)
    names = sorted(costly)
    drawn = names[key("costly") % COSTLY_ONE_IN :: COSTLY_ONE_IN] or names
    return {item for name in names if name not in drawn for item in costly[name]}


def pytest_terminal_summary(terminalreporter, config):
    """Which of the costly ones have run: of what the workers tell, as they alone draw."""
    said = [each for some in terminalreporter.stats.values() for each in some]
    names = {
        each.nodeid.partition("[")[0].removeprefix("tests/")
        for each in said
        if isinstance(each, pytest.TestReport) and "costly" in each.keywords
    }
    if names and config.getoption("--one-in") != 1:
        terminalreporter.write_line(f"of the costly tests (all: --one-in 1) {len(names)} have run:")
        for name in sorted(names):
            terminalreporter.write_line(f"  {name}")


def pytest_collection_finish():
    """What is imported by now stays: the garbage collector need not look through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def share(request):
    """How many of so many draws a test makes where each is compiled, or run on all ranks or in a
    process: all in make thorough, one in ``one_in`` in make test.
    """
    every = request.config.getoption("--one-in") == 1
    return lambda n, one_in=ONE_IN: n if every else -(-n // one_in)


@pytest.fixture(scope="session")
def some_of(share, request):
    """Of names as many, drawn by themselves and the salt."""
    drawn = by_draw(request.config)
    return lambda names, one_in: sorted(names, key=drawn)[: share(len(names), one_in)]


def drawn_by(item):
    """The text by which a test is drawn: its parameters, or the one of them that a mark
    ``drawn_by`` names. All tests of that one run or none, where they share what takes long.
    """
    mark, given = item.get_closest_marker("drawn_by"), getattr(item, "callspec", None)
    if mark is not None and given is not None and mark.args[0] in given.params:
        return str(given.params[mark.args[0]])
    return item.name.partition("[")[2]


def is_long(item):
    return item.get_closest_marker("long") is not None


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """A search path with which the package looks installed to another process: the metadata alone,
    with the entry points of pyproject.toml, and this repository.
    """
    text = (REPOSITORY / "pyproject.toml").read_text()
    section = re.search(r'\[project\.entry-points\."torch\.backends"\]\n(.*?)\n\n', text, re.S)[1]
    folder = tmp_path_factory.mktemp("site")
    metadata = folder / "cute_sharding-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: cute-sharding\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        "[torch.backends]\n" + section.replace('"', "") + "\n"
    )
    return search_path(folder, REPOSITORY)
