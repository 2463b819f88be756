"""Shared by all tests."""

import gc
import os
import re
import subprocess
from collections import defaultdict
from pathlib import Path
from zlib import crc32

import pytest
from processes import REPOSITORY, search_path

# make test runs a fixed set: of each test's parameters one in so many of those in tests/dtensor,
# and none of the tests marked ``costly``. Which ones is a matter of their names alone, so that two
# runs, and two commits, are judged by the same tests. What the set must meet is checked by
# dtensor/promises/test_each_row.py. make thorough, each night, and make releases run all.
ADAPTER, ONE_IN = REPOSITORY / "tests" / "dtensor", 60

# Beside it, of the parameters that are left out, one in so many are drawn by the commit.
DRAWN_ONE_IN = 200

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
        help=f"by what one in {DRAWN_ONE_IN} of the parameters that are left out is drawn and runs "
        "too; by default the commit",
    )


def pytest_configure(config):
    if config.option.salt is None:
        config.option.salt = commit()


def commit():
    """The one that is checked out; nothing where that is not known."""
    command = ["git", "-C", str(REPOSITORY), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def pytest_report_header(config):
    return f"beside the fixed tests: --salt {config.option.salt or repr('')}"


def hashed(*names):
    return crc32(" ".join(names).encode())


def pytest_collection_modifyitems(config, items):
    """Which ones run is a matter of their names, and of a file's tests with the same parameters
    the same ones: what they set up is then needed for these alone.

    The longest files come first, as the files are dealt out to several workers in order.
    """
    items.sort(key=lambda item: [*LONGEST, item.path.name].index(item.path.name))
    if config.option.one_in == 1:
        return
    named = {Path(each.partition("::")[0]).resolve() for each in config.args if "::" in each}
    tests = defaultdict(list)
    for item in items:
        if item.path not in named:
            tests[item.path, getattr(item, "originalname", item.name)].append(item)
    left_out = {item for some in tests.values() for item in left_out_of(some, config)}
    if salt := config.option.salt:
        drawn = {item for item in left_out if not is_costly(item) and is_drawn(item, salt)}
        for item in drawn:
            item.user_properties.append(("drawn", salt))
        left_out -= drawn
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def left_out_of(parameters, config):
    """Those of one test's parameters that are not of the fixed set."""
    mark = parameters[0].get_closest_marker("one_in")
    by_place = ONE_IN if ADAPTER in parameters[0].path.parents else 1
    one_in = config.option.one_in or (mark.args[0] if mark else by_place)
    kept = [item for item in parameters if not is_costly(item)]
    kept.sort(key=lambda item: hashed(item.path.name, item.name.partition("[")[2]))
    return {*parameters} - {*kept[: -(-len(kept) // one_in)]}


def is_drawn(item, salt):
    return hashed(salt, item.nodeid) % DRAWN_ONE_IN == 0


def is_costly(item):
    return item.get_closest_marker("costly") is not None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    salt = dict(item.user_properties).get("drawn")
    if report.failed and salt is not None:
        again = f"drawn by --salt {salt}, beside the fixed tests. It runs by its name:\n"
        report.sections.append(("Drawn", f"{again}    python -m pytest '{item.nodeid}'"))
    return report


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
    return lambda n, one_in: n if every else -(-n // one_in)


@pytest.fixture(scope="session")
def some_of(share):
    """Of names as many, the same ones each time."""
    return lambda names, one_in: sorted(names, key=lambda name: hashed(str(name)))[
        : share(len(names), one_in)
    ]


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


@pytest.fixture(scope="session")
def process_group():
    """One fake group of eight ranks, for all tests that want one."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def stock_rules():
    """torch's own rules in force at the start of a test and at its end, and nothing counted."""
    import cute_sharding

    cute_sharding.disable()
    cute_sharding.stats(reset=True)
    yield
    cute_sharding.disable()
