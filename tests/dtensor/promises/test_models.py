"""torch's test transformer, trained over four gloo processes by programs that never name this
package (models_program.py): each flag against torch without any, and torch against one device.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import models_program
import pytest
import torch
from models_program import PROGRAMS, WORLD

from cute_sharding import _settings

# The programs run once for all tests.
pytestmark = [pytest.mark.processes, pytest.mark.costly]

# for the slowest of machines; what waits for ever fails sooner, by the timeout of its process group
SECONDS = 300
CLOSE = 1e-5
VIEWS, REDISTRIBUTION = (_settings.TABLE[name].flag for name in ("views", "redistribution"))
BOTH = _settings.EVERYTHING
FLAGS = (VIEWS, BOTH)
SAVING = [name for name, program in PROGRAMS.items() if program.saves]


class Runs:
    """What the programs of those names give by the flag that is set, on each rank. They run
    together, when the first of them is asked for.
    """

    def __init__(self, site, folder, names):
        self.site, self.folder, self.names, self.results = site, folder, names, {}

    def __call__(self, flag=None):
        if flag not in self.results:
            self.results[flag] = self.run(flag)
        if isinstance(self.results[flag], str):
            pytest.fail(self.results[flag], pytrace=False)
        return self.results[flag]

    def run(self, flag):
        folder = self.folder / str(flag)
        folder.mkdir()
        ours = (*_settings.FLAGS, "TORCH_DEVICE_BACKEND_AUTOLOAD")
        environment = {name: value for name, value in os.environ.items() if name not in ours}
        environment |= {
            "PYTHONPATH": self.site,
            "OMP_NUM_THREADS": "1",
            **({flag: "1"} if flag else {}),
        }
        with open(folder / "output.txt", "w") as output:
            process = subprocess.Popen(
                [sys.executable, models_program.__file__, str(folder), *self.names],
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                code = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                code = f"still running after {SECONDS} s"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # with the ranks, which it has forked
                    process.wait()
        if code == 0:
            return [torch.load(folder / f"rank{rank}.pt") for rank in range(WORLD)]
        return f"with the flag {flag}: {what_failed(folder, code)}"


def what_failed(folder, code):
    """The traceback of the rank that failed first and by itself: the others then fail as well, by
    what they do not receive, and their backend says so.
    """
    errors = sorted(
        (path.read_text().split("\n", 1) for path in folder.glob("error*.txt")),
        key=lambda parts: float(parts[0]),
    )
    output = (folder / "output.txt").read_text()
    own = [text for _, text in errors if "gloo" not in text.strip().rpartition("\n")[2]]
    if own:
        return own[0]
    crashes = [
        output.find(sign) for sign in ("terminate called", "Fatal Python error") if sign in output
    ]  # a rank that dies in C++ leaves nothing else
    if crashes:
        return output[min(crashes) :][:5000]
    return errors[0][1] if errors else f"exit code {code}\n{output[-5000:]}"


@pytest.fixture(scope="module")
def runs(request, site, tmp_path_factory):
    """Of the programs that the tests of this session are about."""
    asked = {
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    names = [name for name in PROGRAMS if name in asked] or [*PROGRAMS]
    return Runs(site, tmp_path_factory.mktemp("models"), names)


def leaves(value, name=""):
    """(name, tensor) of everything in a result but the counts."""
    if not isinstance(value, dict):
        return [(name, value)]
    return [
        leaf
        for key, part in value.items()
        if key != "collectives"
        for leaf in leaves(part, f"{name} {key}")
    ]


def assert_same(result, expected, case, close=0.0):
    """Equal bit for bit; or, tensor by tensor, to ``close`` of the largest element."""
    result, expected = leaves(result), leaves(expected)
    assert [name for name, _ in result] == [name for name, _ in expected] and expected, case
    for (name, x), (_, y) in zip(result, expected):
        assert x.shape == y.shape and x.dtype == y.dtype and y.isfinite().all(), (
            f"{case}{name}: {x} is not {y}"
        )
        if close == 0:
            assert torch.equal(x, y), (
                f"{case}{name}: off by {(x - y).abs().max()}, of {y.abs().max()}"
            )
        else:
            assert (x - y).abs().max() <= close * y.abs().max(), (
                f"{case}{name}: off by {(x - y).abs().max()}, of {y.abs().max()}"
            )


def differs(parameters, others):
    return any(not torch.equal(value, others[name]) for name, value in parameters.items())


def test_the_flags_are_all_that_is_different(runs):
    loaded = {
        flag: ["cute_sharding.dtensor" in result["modules"] for result in runs(flag)]
        for flag in (None, *FLAGS)
    }
    assert loaded == {None: [False] * WORLD} | {flag: [True] * WORLD for flag in FLAGS}
    assert "cute" not in Path(models_program.__file__).read_text()


@pytest.mark.parametrize(
    "name", [name for name, program in PROGRAMS.items() if not program.arguments["dropout_p"]]
)
def test_torch_is_right_by_itself(runs, name):
    """Else there would be nothing to compare with. (What dropout drops is drawn otherwise on shards
    than on one device.)
    """
    expected = models_program.alone(name)
    for rank, result in enumerate(runs()):
        assert_same(
            {key: result[name][key] for key in ("losses", "norms", "parameters")},
            expected,
            f"rank {rank}",
            CLOSE,
        )
        assert differs(result[name]["parameters"], dict(PROGRAMS[name].model().named_parameters()))


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_trains_as_with_torch(runs, name, flag):
    """Losses, norms, parameters and what is saved and loaded: the same, to the last bit where
    redistribution is torch's own. It sums in another order than ours may.
    """
    for rank, (result, stock) in enumerate(zip(runs(flag), runs(), strict=True)):
        assert_same(result[name], stock[name], f"rank {rank}", 0.0 if flag == VIEWS else CLOSE)


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_step_communicates_more(runs, name, flag):
    for rank, (result, stock) in enumerate(zip(runs(flag), runs(), strict=True)):
        for step, (counts, most) in enumerate(
            zip(result[name]["collectives"], stock[name]["collectives"], strict=True)
        ):
            assert 0 < sum(counts.values()) <= sum(most.values()), (
                f"rank {rank}, step {step}: {counts} for {most}"
            )
            if flag == VIEWS:
                assert counts == most or sum(counts.values()) < sum(most.values()), (
                    f"rank {rank}, step {step}: {counts} for {most}"
                )


@pytest.mark.parametrize("name", ["sp", "sp, uneven", "tp, uneven", "fsdp of tp, uneven"])
def test_redistribution_is_by_plan(runs, name):
    """The comparisons above are of something: with the flag, other collectives do it."""
    assert all(
        result[name]["collectives"] != stock[name]["collectives"]
        for result, stock in zip(runs(BOTH), runs())
    )


@pytest.mark.parametrize("flag", [None, *FLAGS])
@pytest.mark.parametrize("name", SAVING)
def test_checkpoints_come_back(runs, name, flag):
    for rank, result in enumerate(runs(flag)):
        trained, state, restored = (
            result[name]["parameters"],
            result[name]["state"],
            result[name]["restored"],
        )
        assert_same(restored["whole"], trained, f"rank {rank}: the full state dict")
        assert differs(trained, restored["changed"])
        assert_same(restored["loaded"], trained, f"rank {rank}: loaded")
        assert_same(restored["loaded state"], state, f"rank {rank}: loaded")
        # And training goes on from there as it went on before.
        assert_same(restored["onward again"], restored["onward"], f"rank {rank}: onward")
        assert_same(restored["changed again"], restored["changed"], f"rank {rank}: onward")
        if "other" in restored:
            assert differs(trained, restored["other"])
            assert_same(
                restored["loaded whole"], trained, f"rank {rank}: loaded from the full state dict"
            )
    assert ("other" in restored) == (name != "fsdp of tp, uneven")
