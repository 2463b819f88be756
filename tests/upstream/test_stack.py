"""The stack for PyTorch, proved: applied patch by patch to a copy of the installed torch, in which
this package is not installed.
"""

import ast
import json
import random
import re
import sys
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

REPOSITORY = Path(__file__).parent.parent.parent
sys.path.insert(0, str(REPOSITORY))  # `upstream` and `benchmarks` are no part of the package

from benchmarks.views import MODEL_VIEWS, drawn_case, held  # noqa: E402
from cute_sharding.dtensor import propagate_shape_and_sharding  # noqa: E402
from cute_sharding.relations import view  # noqa: E402
from cute_sharding.relations.table import BY_OP  # noqa: E402
from upstream import conformance  # noqa: E402
from upstream.edits import Hook, either  # noqa: E402
from upstream.patches import BUGS, STACK  # noqa: E402
from upstream.shadow import apply, run, shadow  # noqa: E402
from upstream.stack import counted, touched, write  # noqa: E402

SITE = Path(torch.__file__).parent.parent
# Imports make many objects that stay: not to look through them saves a fifth of the time.
WORKER = f"""
import gc, runpy
gc.disable()
runpy.run_path({str(REPOSITORY / "upstream" / "conformance.py")!r}, run_name="__main__")
"""
ON = {"USE_CUTE_VIEW_PROPAGATION": "1"}
EXCHANGE = {"USE_CUTE_REDISTRIBUTION": "1"}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The stack's files, in order."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("patches")
    return write(STACK, SITE / "torch", tree, out)


@pytest.fixture(scope="module")
def copies(written, tmp_path_factory):
    """For each patch a torch with it and those before it applied."""
    changed = [*touched(STACK), *(path for patch in STACK for path in patch.files)]
    result = []
    for count in range(1, len(STACK) + 1):
        folder = tmp_path_factory.mktemp("torch")
        shadow(SITE, folder, changed)
        for patch in written[:count]:
            apply(patch, folder)
        result.append(folder)
    return result


def asked(folder, work, **flags):
    """What the torch there makes of the cases of each kind of ``work``."""
    return json.loads(run(folder, ["-c", WORKER], given=json.dumps(work), **flags))


def test_the_package_is_absent_there(copies):
    code = (
        "from importlib.util import find_spec; "
        "print(find_spec('cute_sharding'), find_spec('torch').origin)"
    )
    for folder in copies:
        found, path = run(folder, ["-c", code]).split()
        assert found == "None"
        assert path == str(folder / "torch" / "__init__.py")


def test_lines(written):
    counts = {patch.name: counted(file) for patch, file in zip(STACK, written, strict=True)}
    assert all(count.columns <= 88 for count in counts.values())
    views = {"view-propagation", "symbolic-sizes"}
    assert sum(count.added for name, count in counts.items() if name in views) <= 900
    assert counts["exchange-redistribution"].added <= 900
    assert all(patch.tests for patch in STACK)


def test_the_same_to_the_last_byte(written, tmp_path):
    (tmp_path / "tree").mkdir()
    again = write(STACK, SITE / "torch", tmp_path / "tree", tmp_path / "out")
    assert [p.read_bytes() for p in again] == [p.read_bytes() for p in written]


def test_a_torch_without_an_anchor_is_refused(tmp_path):
    (tmp_path / "torch").mkdir()
    for path in touched(STACK):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("nothing\n")
    with pytest.raises(LookupError, match="these lines should stand in it once"):
        STACK[0].apply(tmp_path)


def test_lines_that_no_release_has_are_refused():
    hook = either(Hook("a.py", "old\n", "new\n"), Hook("a.py", "older\n", "new\n"))
    assert hook.applied("older\n") == "new\n"
    for source in ("oldest\n", "x\nolder\nold\n"):
        with pytest.raises(LookupError, match="the lines of one of these hooks"):
            hook.applied(source)


@pytest.mark.parametrize("number", range(len(STACK)), ids=[patch.name for patch in STACK])
@pytest.mark.costly
@pytest.mark.one_in(3)
def test_its_own_tests_pass(copies, number, request):
    """What of them runs in one process; make thorough runs also those of processes over gloo."""
    for path in STACK[number].tests:
        alone = in_one_process((copies[number] / path).read_text())
        every = request.config.getoption("--one-in") == 1
        run(copies[number], [path, *([] if every else alone)], timeout=900)


def in_one_process(source):
    """The names of the test classes that start no processes."""
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and "TestCase" in map(ast.unparse, node.bases):
            found.append(node.name)
        if isinstance(node, ast.Assign) and "create_local_tensor_test_class" in ast.unparse(node):
            found.append(ast.unparse(node.targets[0]))
    assert found
    return found


# -- conformance -----------------------------------------------------------------------------------


def views(count):
    """Drawn reshapes, each strict and not."""
    rng = random.Random(14)
    drawn = []
    while len(drawn) < count:
        case = drawn_case(rng)
        if case is not None:
            drawn.append(case)
    return [
        {
            "op": "Tensor.view",
            "shape": case.shape,
            "args": [case.target],
            "mesh": case.mesh,
            "placements": list(map(conformance.cut, case.placements)),
            "strict": strict,
        }
        for case in drawn
        for strict in (True, False)
    ]


def draw_arguments(rng, shape):
    """An op other than reshape, with arguments that fit."""
    ndim = len(shape)
    ones = [d for d, n in enumerate(shape) if n == 1]
    return rng.choice(
        [
            ("Tensor.expand", [[n if n != 1 else rng.choice((1, 4)) for n in shape]]),
            ("Tensor.expand", [[2, *shape]]),
            ("Tensor.repeat", [[rng.choice((1, 2, 3)) for _ in shape]]),
            ("Tensor.repeat", [[2, *(rng.choice((1, 2)) for _ in shape)]]),
            ("torch.permute", [rng.sample(range(ndim), ndim)]),
            ("torch.transpose", [rng.randrange(ndim), rng.randrange(ndim)]),
            ("torch.unsqueeze", [rng.randint(0, ndim)]),
            ("torch.squeeze", [rng.sample(ones, rng.randint(0, len(ones)))]),
            ("torch.view_as_real", []),
        ]
    )


def other_ops(count):
    rng = random.Random(41)
    cases = []
    while len(cases) < count:
        shape = tuple(rng.choice((1, 1, 2, 3, 4, 6)) for _ in range(rng.randint(1, 4)))
        mesh = rng.choice([(2,), (3,), (2, 2), (1, 3)])
        op, args = draw_arguments(rng, shape)
        placements = [
            rng.choice(["R", "P", [d := rng.randrange(len(shape)), rng.choice((1, 1, shape[d]))]])
            for _ in mesh
        ]
        case = {"op": op, "shape": shape, "args": args, "mesh": mesh, "placements": placements}
        cases.append({**case, "strict": rng.random() < 0.5})
    return cases


def package_answer(case):
    """What this package answers; None where it raises. What is pending stays so in the patch, as in
    torch; the package reduces it first where the output is larger, and is asked without it.
    """
    shape, mesh = tuple(case["shape"]), tuple(case["mesh"])
    known = ["R" if p == "P" else p for p in case["placements"]]
    placements = tuple(map(conformance.placement, known))
    if case["op"] == "Tensor.view":
        rule = view.reshape(shape, *case["args"])
    else:
        rule = BY_OP[case["op"]].rule(shape, *case["args"])
    try:
        source, output = propagate_shape_and_sharding(placements, shape, rule, mesh, case["strict"])
    except RuntimeError:
        return None
    return [
        ["P" if p == "P" else conformance.cut(found) for p, found in zip(case["placements"], side)]
        for side in (source, output)
    ]


held_by_all = lru_cache(maxsize=None)(held)  # the copies answer alike


def is_right(case, answer):
    """Whether a reshape's placements hold the same elements before and after."""
    source, output = (tuple(map(conformance.placement, side)) for side in answer)
    before = held_by_all(tuple(case["shape"]), case["mesh"], source)
    return before == held_by_all(tuple(case["args"][0]), case["mesh"], output)


def is_free_alike(case, *answers):
    """Whether both are the same or not free: the package then moves the input for less."""
    free = [isinstance(each, list) and each[0] == case["placements"] for each in answers]
    return answers[0] == answers[1] or not any(free)


@pytest.fixture(scope="module")
def drawn(share):
    """Cases of reshapes, of the other ops, and of redistributions."""
    return {
        "views": views(share(2000, 10)),
        "other ops": other_ops(share(2000, 10)),
        "moved": redistributions(share(400, 10)),
    }


@pytest.fixture(scope="module")
def answered(copies, drawn, share):
    """What each copy makes of what is drawn: without a flag of all of it, with a flag of what that
    changes; in make test the last copy, which has all patches.
    """
    last = copies[-share(len(copies), len(copies)) :]
    both = [*drawn["views"], *drawn["other ops"]]

    def by_kind(said):
        split = len(drawn["views"])
        return said | {"views": said["answers"][:split], "other ops": said["answers"][split:]}

    return {
        "off": [by_kind(asked(copy, {"answers": both, "moved": drawn["moved"]})) for copy in last],
        "views": [by_kind(asked(copy, {"answers": both}, **ON)) for copy in last],
        "exchange": asked(copies[-1], {"moved": drawn["moved"]}, **EXCHANGE)["moved"],
    }


@pytest.fixture(scope="module")
def torchs(drawn):
    """Of each kind of case what the installed torch makes of it."""
    work = {
        "views": conformance.answer,
        "other ops": conformance.answer,
        "moved": conformance.moved,
    }
    try:
        return {kind: json.loads(json.dumps([*map(work[kind], drawn[kind])])) for kind in drawn}
    finally:
        conformance.made.cache_clear()
        dist.destroy_process_group()


def test_a_view_of_each_copy(copies):
    """One, where make test draws no more."""
    case = {"op": "Tensor.view", "shape": (4, 6), "args": [(24,)], "strict": True}
    case |= {"mesh": (2,), "placements": [[1, 1]]}
    for folder in copies:
        assert asked(folder, {"answers": [case]}, **ON)["answers"] == [[[[1, 1]], [[0, 4]]]]


@pytest.mark.costly
@pytest.mark.parametrize(("kind", "least"), [("views", 50), ("other ops", 50), ("moved", 30)])
def test_off_nothing_changes(torchs, answered, kind, least):
    """Wrong ones included."""
    assert len({json.dumps(answer) for answer in torchs[kind]}) > least
    for found in answered["off"]:
        assert found[kind] == torchs[kind]


@pytest.mark.costly
def test_on_views_are_as_good_as_the_package(drawn, answered, torchs):
    cases = drawn["views"]
    package = [package_answer(case) for case in cases]
    for found in answered["views"]:
        free = 0
        for case, answer, stock, ours in zip(cases, found["views"], torchs["views"], package):
            if isinstance(answer, str):
                assert ours is None, case
                assert case["strict"], case
                # No program that runs rightly without the flag is refused.
                assert isinstance(stock, str) or not is_right(case, stock), case
                continue
            assert is_right(case, answer) and is_free_alike(case, answer, ours), case
            free += answer[0] == case["placements"]
        assert free > len(cases) / 4


@pytest.mark.costly
def test_on_other_ops_are_as_good_as_the_package(drawn, answered):
    for found in answered["views"]:
        agreed = 0
        for case, answer in zip(drawn["other ops"], found["other ops"]):
            if case["op"] == "torch.squeeze":
                continue  # the package asks for whole dims in its strategy, which stands above this
            ours = package_answer(case)
            assert is_free_alike(case, answer, ours), (case, ours)
            agreed += answer == ours
        assert agreed > len(drawn["other ops"]) / 2


def redistributions(count):
    """Drawn, of plain and strided shards that divide and that do not, and of sums."""
    rng = random.Random(3)
    cases = []
    for mesh in [(2,), (4,), (2, 2), (3, 2), (2, 2, 2), (2, 1, 3), (1, 4)]:
        for _ in range(count // 7):
            shape = [rng.choice((0, 1, 2, 3, 4, 5, 6, 8, 12)) for _ in range(rng.randint(1, 3))]

            def draw(others, shape=shape):
                dim = rng.randrange(len(shape))
                return rng.choice([*others, [dim, 1], [dim, 1], [dim, rng.choice((2, 3, 4))]])

            others = rng.choice((["R"], ["R", "P"]))
            cases.append(
                {
                    "mesh": mesh,
                    "shape": shape,
                    "source": [draw(others) for _ in mesh],
                    "target": [draw(["R"]) for _ in mesh],
                    "ordered": [rng.random() < 0.3, rng.random() < 0.3],
                }
            )
    return cases


def is_moved_rightly(case, elements):
    """Whether every rank holds what the target's placements say, of a tensor of flat indices."""
    placements = list(map(conformance.placement, case["target"]))
    return elements == list(map(list, held(case["shape"], case["mesh"], placements)))


@pytest.mark.costly
def test_redistributions(drawn, answered, torchs):
    """With the flag all that go by exchange are right, and all others are as they were."""
    cases = drawn["moved"]
    wrong = raised = by_exchange = 0
    for case, (exchanged, elements), (_, before) in zip(
        cases, answered["exchange"], torchs["moved"]
    ):
        if not exchanged:
            assert elements == before, case
            continue
        assert is_moved_rightly(case, elements), case
        by_exchange += 1
        raised += isinstance(before, str)
        wrong += not (isinstance(before, str) or is_moved_rightly(case, before))
    assert by_exchange > len(cases) / 3
    assert wrong > 0  # what the flag is for
    assert raised > 0


@pytest.mark.costly
def test_model_views_are_timed(copies):
    """The harness measures what it says; the bar itself is in docs/upstream.md."""
    cases = [
        {
            "shape": shape,
            "target": target,
            "mesh": mesh,
            "placements": list(map(conformance.cut, placements)),
        }
        for _, shape, target, mesh, placements in MODEL_VIEWS[:3]
    ]
    ratios = asked(copies[0], {"times": cases})["times"]
    assert len(ratios) == 3
    assert all(0 < ratio < 2 for ratio in ratios)


# -- torch's own bugs ------------------------------------------------------------------------------


# Runs test files as programs, each in a fork of a process that has imported what they need.
FORKS = """
import gc, json, os, runpy, sys
gc.disable()
import torch.testing._internal.distributed._tensor.common_dtensor
said = {}
for path, classes in json.load(sys.stdin).items():
    child = os.fork()
    if not child:
        output = os.open("said", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(output, 1), os.dup2(output, 2)
        sys.argv = [path, *classes]
        code = 0
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            code = end.code
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            code = 2
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code if type(code) is int else bool(code))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said[path] = code, open("said").read()
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def bugs_tested(tmp_path_factory, request):
    """By bug, what its test says without the patches, and with them: (exit code, what it wrote).
    What of it runs in one process, on LocalTensor or as one rank after the other. make thorough
    applies each patch by itself.
    """
    items = [item for item in request.session.items if item.path == request.path]
    asked = [item.callspec.params["bug"] for item in items if "bugs_tested" in item.fixturenames]
    together = [asked] if request.config.getoption("--one-in") != 1 else [[bug] for bug in asked]
    found = {}
    for bugs in together:
        folder = tmp_path_factory.mktemp("bugs")
        written = write(bugs, SITE / "torch", folder / "tree", folder / "out")
        assert all(counted(patch).columns <= 88 for patch in written)
        new = {path: bug.files[path]() for bug in bugs for path in bug.files}
        torch_ = folder / "torch"
        shadow(SITE, torch_, [*touched(bugs), *new])
        tests = {test: in_one_process(new[test]) for bug in bugs for test in bug.tests}
        for test in tests:
            (torch_ / test).parent.mkdir(parents=True, exist_ok=True)
            (torch_ / test).write_text(new[test])
        before = json.loads(run(torch_, ["-c", FORKS], given=json.dumps(tests)))
        for test in tests:
            (torch_ / test).unlink()
        for patch in written:
            apply(patch, torch_)
        after = json.loads(run(torch_, ["-c", FORKS], given=json.dumps(tests)))
        for bug in bugs:
            [test] = bug.tests
            found[bug.name] = before[test], after[test]
    return found


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
@pytest.mark.costly
@pytest.mark.one_in(3)
def test_a_bug_is_there_and_mended(bug, bugs_tested):
    """Its test fails without the patch, and passes with it."""
    (code, said), (code_with, said_with) = bugs_tested[bug.name]
    assert code, said
    assert re.search(r"FAILED \((failures|errors)=", said), said
    assert not code_with, said_with
    assert re.search(r"^OK", said_with, re.M), said_with
