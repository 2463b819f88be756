"""What a profile says of a program whose communication is known."""

import json
import warnings
from html.parser import HTMLParser
from importlib.metadata import entry_points

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import cute_sharding
from cute_sharding.dtensor.profile.refusing import CommunicationError

ON = {"redistribution": True, "movement": True}
pytest_plugins = "pytester"


@pytest.fixture
def mesh():
    return init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def tensor(mesh, shape, dim):
    local = list(shape)
    local[dim] //= 4
    return DTensor.from_local(torch.ones(local), mesh, [Shard(dim)])


def program(x):
    y = x.redistribute(placements=[Replicate()])  # asked for
    z = x[1:5]  # a slice of the sharded dim
    v = x.view(48)  # a view that is free with views, and in PyTorch
    return y, z, v


def line_of(p, op):
    (line,) = [line for line in p.lines if line.cause.op == op]
    return line


def test_a_slice_and_what_pytorch_sends_for_it(mesh):
    x = tensor(mesh, (8, 6), 0)
    with cute_sharding.profile() as off:
        program(x)
    with cute_sharding.enabled(**ON), cute_sharding.profile() as on:
        program(x)
    # PyTorch gathers 6 of 8 rows of 6 floats; of rows 1 to 4 the busiest rank lacks one.
    before, after = line_of(off, "slice"), line_of(on, "slice")
    assert before.received == before.of(before.cause.torch) == 6 * 6 * 4
    assert before.of(before.cause.package) == after.received == 6 * 4
    assert after.of(after.cause.torch) == 6 * 6 * 4
    assert [moved.change for moved in before.cause.moved] == ["S(0) -> R"]
    assert before.cause.kind == after.cause.kind == "op"
    assert "PyTorch's rule for slice" in before.cause.why
    # Sharded by columns of which none is cut away, it is free.
    assert "sends nothing if its input is [R]" in " ".join(before.cause.todo)


def test_a_redistribution_that_the_program_asks_for(mesh):
    x = tensor(mesh, (8, 6), 0)
    with cute_sharding.profile() as p:
        program(x)
    line = line_of(p, "redistribute")
    assert line.cause.kind == "asked"
    (moved,) = line.cause.moved
    assert (moved.shape, moved.before, moved.after) == ((8, 6), ("S(0)",), ("R",))
    assert line.kinds == {"all-gather": 1}
    assert line.received == line.of(line.cause.torch) == 6 * 6 * 4


def test_what_the_package_makes_free_is_listed(mesh):
    x = tensor(mesh, (8, 8), 1)
    with cute_sharding.enabled(**ON), cute_sharding.profile() as p:
        x.view(4, 16)
    (line,) = p.report.freed
    assert line.cause.op == "view" and not line.events and p.collectives == []
    assert "What cute_sharding removes" in str(p)


def test_why_a_view_communicates(mesh):
    heads = DTensor.from_local(torch.ones(4, 2), mesh, [Shard(1)])  # (4, 8): 2 heads of 4 elements
    with cute_sharding.enabled(**ON), cute_sharding.profile() as p:
        heads.view(4, 2, 4)
    line = line_of(p, "view")
    assert "heads do not divide by the mesh" in line.cause.why
    assert line.cause.todo and "sends nothing if its input is" in line.cause.todo[0]


def test_seconds_are_those_of_the_network_that_is_given(mesh):
    x = tensor(mesh, (8, 6), 0)
    with cute_sharding.profile(network="flat:0,1e-3") as p:
        program(x)
    line = line_of(p, "redistribute")
    assert line.model == pytest.approx(36e-3)  # 6 rows of 6 elements, a millisecond each
    assert 0 < line.measured < 10


def test_the_table_fits_and_says_it_in_words(mesh):
    x = tensor(mesh, (8, 6), 0)
    with cute_sharding.profile() as p:
        program(x)
    for width in (80, 100, 140):
        assert max(map(len, p.table(width).splitlines())) <= width
    text = p.table(100)
    assert "cute_sharding is off." in text and "mesh tp=4" in text
    assert "With cute_sharding.enable(redistribution=True, movement=True)" in text
    assert "test_profile.py:" in text and "S(0) -> R" in text
    assert "x[1:5]  # a slice of the sharded dim" in text
    assert p.table(100, most=1).count("all-gather ") < text.count("all-gather ")
    assert repr(p) == "<Profile of 2 collectives>"


def test_nothing_is_sent(mesh):
    with cute_sharding.profile() as p:
        tensor(mesh, (8, 6), 0) * 2
    assert "No communication." in str(p)
    assert p.to_dict()["collectives"] == 0


def test_as_data_as_a_trace_and_as_a_page(mesh, tmp_path):
    x = tensor(mesh, (8, 6), 0)
    with cute_sharding.profile() as p:
        program(x)
    data = json.loads(json.dumps(p.to_dict()))
    assert data["collectives"] == 2 and data["received_bytes"] == 2 * 6 * 6 * 4
    assert {line["op"] for line in data["lines"]} == {"slice", "redistribute"}

    trace = json.loads(p.save(tmp_path / "trace.json").read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [event["cat"] for event in events] == ["all-gather"] * 2
    assert all(event["dur"] > 0 and event["args"]["line"].startswith("/") for event in events)

    page = p.save(tmp_path / "page.html").read_text()
    opened = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: opened.append(tag)
    parser.feed(page)
    assert {"table", "script", "svg"} <= set(opened)
    assert not {"link", "img", "iframe"} & set(opened) and "src=" not in page
    assert p.save(tmp_path / "table.txt").read_text().startswith("Rank 0 of 8")
    with pytest.raises(ValueError, match=r"a profile is written to a file that ends in \.json"):
        p.save(tmp_path / "page.pdf")


def test_a_profile_does_not_change_counts_or_what_is_on(mesh):
    x = tensor(mesh, (8, 6), 0)
    with cute_sharding.enabled(**ON):
        with cute_sharding.profile():
            program(x)
        inside = cute_sharding.stats()
        cute_sharding.stats(reset=True)
        with cute_sharding.profile() as p:
            pass
        str(p)
        assert cute_sharding.stats() == {} and inside
        assert cute_sharding.settings().movement


# -- no communication ------------------------------------------------------------------------------


def test_the_first_collective_raises_before_it_is_sent(mesh):
    x = tensor(mesh, (8, 6), 0)
    from cute_sharding.dtensor.profile import Recorder

    with (
        Recorder() as recorder,
        pytest.raises(CommunicationError) as raised,
        cute_sharding.no_communication(),
    ):
        x * 2
        program(x)
    assert recorder.collectives == []
    assert "test_profile.py" in str(raised.value) and "in program" in str(raised.value)


def test_what_the_program_asks_for_may_pass(mesh):
    x = tensor(mesh, (8, 6), 0)
    with (
        pytest.raises(CommunicationError, match=r"slice at .* all-gather among 4 ranks"),
        cute_sharding.no_communication(allow_explicit=True),
    ):
        program(x)


def test_a_gradient_raises_with_the_line_of_its_forward_op(mesh):
    w = DTensor.from_local(torch.ones(8, 6), mesh, [Replicate()]).requires_grad_()
    with (
        pytest.raises(CommunicationError, match="the gradient of redistribute at") as raised,
        cute_sharding.no_communication(),
    ):
        rows = w.redistribute(placements=[Shard(0)])  # a slice, and its gradient a gather
        rows.to_local().sum().backward()
    line = int(str(raised.value).partition("test_profile.py:")[2].partition(" ")[0])
    with open(__file__) as file:
        assert "a slice, and its gradient a gather" in file.readlines()[line - 1]


def test_a_warning_instead(mesh):
    x = tensor(mesh, (8, 6), 0)
    with (
        warnings.catch_warnings(record=True) as caught,
        cute_sharding.no_communication(action="warn"),
    ):
        warnings.simplefilter("always")
        for _ in range(3):
            program(x)
    said = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
    assert len(said) == 2 and "What to do: slice sends nothing if" in said[1]
    assert caught[0].filename == __file__


def test_another_action():
    with (
        pytest.raises(ValueError, match="action='ignore' is none of 'raise', 'warn'"),
        cute_sharding.no_communication(action="ignore"),
    ):
        pass


def test_the_fixture(pytester):
    pytester.makepyfile(
        """
        import torch
        import torch.distributed as dist

        def test_free(no_communication):
            torch.ones(2) * 2

        def test_sends(no_communication):
            dist.all_reduce(torch.ones(2))
        """
    )
    is_installed = any(found.name == "cute_sharding" for found in entry_points(group="pytest11"))
    plugin = [] if is_installed else ["-p", "cute_sharding._pytest"]
    result = pytester.runpytest_inprocess(*plugin, "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*CommunicationError: all_reduce at*"])
