"""What a profile says of a program whose communication is known."""

import json
import re
from contextlib import nullcontext
from html.parser import HTMLParser

import pytest
import torch
from profiled import ON, program, tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding
from cute_sharding.dtensor.profile.asking import Answered
from cute_sharding.dtensor.profile.causes import _as_recorded
from cute_sharding.dtensor.profile.remedies import _mark
from cute_sharding.profiling import Collective, Other, Root
from cute_sharding.showing.table import aligned, text


@pytest.fixture
def mesh():
    return init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


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
    assert "Nothing is sent here; PyTorch's rules would send, for the same placements" in str(p)


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
    assert "cute_sharding.enable(redistribution=True, movement=True)" in text
    assert "profiled.py:" in text and "S(0) -> R" in text
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
    with pytest.raises(ValueError, match=r"file name for the profile that ends in one of \.json"):
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


def joined(text):
    return " ".join(text.split())


def test_a_figure_of_the_same_ops_is_not_said_to_be_that_of_the_program(mesh):
    x = tensor(mesh, (8, 6), 0)
    with cute_sharding.profile() as off:
        program(x)
    with cute_sharding.enabled(**ON), cute_sharding.profile() as on:
        program(x)
    said = joined(on.table(100))
    assert "each with its present placements: PyTorch's rules would receive 288 B" in said
    assert "This does not compare whole programs: with the package off, later tensors" in said
    command = "python -m cute_sharding estimate FILE.py:FUNCTION --mesh tp=4"
    assert f"For the total with each setting: {command} (see docs/estimate.md)." in said
    assert "removes" not in said and "%" not in said
    said = joined(off.table(100))
    assert "would receive 168 B of 288 B. This does not compare" in said
    assert "with the package on, later tensors" in said and command in said


def test_more_seconds_than_by_pytorchs_rules_are_said(mesh):
    x = tensor(mesh, (8, 6), 0)
    with cute_sharding.enabled(**ON), cute_sharding.profile() as p:
        x[1:5]
    assert "take longer" not in str(p)
    (line,) = p.lines
    dear = line._replace(events=2 * line.events)
    assert dear.model > line.cause.torch.seconds
    said = joined(text(p.report._replace(lines=(dear,)), 100, 20))
    assert "ops take longer than with PyTorch's rules: 12 us instead of 6" in said
    assert "What to do: compare the flags, with the option --settings PyTorch,views,all" in said
    root = Root(None, False, "mul", "mul in model.py:1 combines")
    rooted = dear._replace(cause=dear.cause._replace(root=root))
    said = joined(text(p.report._replace(lines=(rooted,)), 100, 20))
    assert 'first make the change that is named after "To change first".' in said
    assert f"may follow from one op. {root.text}." in said


def test_what_is_on_is_said_where_nothing_ran(mesh):
    x = tensor(mesh, (8, 6), 0)
    on = "cute_sharding is on (views, ops, redistribution, movement)."
    with cute_sharding.enabled(**ON):
        with cute_sharding.profile() as nothing:
            pass
        with cute_sharding.profile() as asked:
            x.redistribute(placements=[Replicate()])  # of DTensor's ops none runs
    assert on in joined(str(nothing)) and on in joined(str(asked))


def test_placements_are_not_cut_and_strided_ones_are_explained(mesh):
    blocks = DTensor.from_local(torch.ones(4, 8), mesh, [_StridedShard(0, split_factor=4)])
    with cute_sharding.enabled(**ON), cute_sharding.profile() as p:
        blocks.redistribute(placements=[Shard(1)])
        blocks.redistribute(placements=[Replicate()])
    for width in (72, 80, 100, 140):
        table = p.table(width).partition("Why, and")[0]
        after = table.partition("line  ")[2].partition("received:")[0]
        assert after.count("_S(0, 4)") == 2 and " S(1)" in after and re.search(r"> R\s", after)
        assert not re.search(r"(->|-|S\(|[0-9R])\.\.", after)
        assert max(map(len, table.splitlines())) <= width
    assert "_S(0, 4): a _StridedShard; dim 0 is divided into 4 blocks" in p.table(100)


def test_a_cell_of_several_tensors_goes_on_in_the_next_line():
    rows = [("1", "long_name_of_an_op", "_S(0, 3) -> R,\n[S(0), _S(0, 4)] -> [R, R]")]
    assert aligned(rows, 35, {1, 2}, {1: 10}, {2: 10}) == [
        "1  long_nam..  _S(0, 3) -> R,",
        "               [S(0), _S(0, 4)] ->",
        "               [R, R]",
    ]
    assert aligned(rows, 80, {1, 2}, {1: 10}, {2: 10})[0].endswith("R, [S(0), _S(0, 4)] -> [R, R]")


def test_the_rows_of_a_line_are_counted(mesh):
    x = tensor(mesh, (8, 6), 0)
    with cute_sharding.profile() as p:
        _ = x[1:5], x[2:5]
    assert "2 collectives on 1 line (2 rows: one for each op and set of" in joined(str(p))
    assert "and 1 row more" in p.table(100, most=1)


# -- hints -----------------------------------------------------------------------------------------


def test_hints_are_ranked_and_those_that_do_not_pay_are_marked(mesh):
    x = tensor(mesh, (8, 6), 0)
    with cute_sharding.profile() as off:
        x[1:5]
    (todo,) = line_of(off, "slice").cause.todo  # a gather is what the slice does now
    assert todo.endswith("receives 144 B (no less than now)")
    many = tensor(mesh, (8, 8), 0)
    with cute_sharding.profile() as off:
        many[1:5]
    todo = line_of(off, "slice").cause.todo  # on CPUs PyTorch gathers on its way to columns, too
    assert len(todo) == 2 and all(
        each.endswith("receives 192 B (no less than now)") for each in todo
    )
    with cute_sharding.enabled(redistribution=True), cute_sharding.profile() as on:
        many[1:5]
    todo = line_of(on, "slice").cause.todo
    assert "[S(1)]; a redistribution to these placements receives 48 B" in todo[0]
    # The slice takes columns, so nothing pays.
    assert len(todo) == 2 and all(each.endswith("(no less than now)") for each in todo)


@pytest.mark.parametrize("flags", [{}, ON], ids=["off", "on"])
def test_a_chunk_of_a_sharded_dim_is_told_of_fused_weights(mesh, flags):
    x = tensor(mesh, (2, 24), 1)
    with cute_sharding.enabled(**flags) if flags else nullcontext():
        with cute_sharding.profile() as p:
            x.chunk(3, -1)
        with cute_sharding.profile() as uneven:
            x.split([4, 20], -1)
    first = line_of(p, "split").cause.todo[0]
    assert "if its input is [_S(1, 3)], as with a fused weight" in first
    assert first.endswith("sharded on tp: see docs/tutorial.md#fused-weights")
    assert ("cute_sharding.enable(movement=True)" in first) == (not flags)
    assert "fused" not in " ".join(uneven.lines[0].cause.todo)
    with cute_sharding.enabled(**ON), cute_sharding.profile() as free:
        fused = DTensor.from_local(torch.ones(2, 6), mesh, [_StridedShard(1, split_factor=3)])
        fused.chunk(3, -1)
    assert not free.collectives


def test_a_gradient_says_what_it_is(mesh):
    x = tensor(mesh, (8, 8), 0).requires_grad_()
    with cute_sharding.enabled(**ON), cute_sharding.profile() as p:
        rows = x[1:5]
        rows.redistribute(placements=[Shard(1)]).to_local().sum().backward()
    gradients = [line.cause for line in p.lines if line.cause.backward and line.events]
    assert {cause.kind for cause in gradients} == {"op", "asked"}
    said = {
        "op": "the placements of this gradient come from slice in line {}, which also communicates",
        "asked": "redistribute() in line {} causes this communication: remove the call, or",
    }
    for cause in gradients:
        assert cause.todo[-1].startswith(said[cause.kind].format(cause.place.line))


def test_a_gradient_of_an_op_that_sends_says_what_that_op_avoids(mesh):
    """Where none is known of the gradient's op."""
    x = DTensor.from_local(torch.ones(8, 8), mesh, [Partial()]).requires_grad_()
    with cute_sharding.profile() as p:
        torch.nn.functional.layer_norm(x, [8]).sum().full_tensor().backward()
    forward, backward = [
        next(line.cause for line in p.lines if line.cause.backward == which and line.events)
        for which in (False, True)
    ]
    assert backward.todo == (
        f"the placements of this gradient come from native_layer_norm in line "
        f"{forward.place.line}, which also communicates: {forward.todo[0]}",
    )


def test_what_an_op_receives_now_is_what_was_recorded_where_its_rule_does_not_say():
    cause = Answered((), (), "", Other(None))
    one = Collective("send", "", (0, 1), "float32", 4, 6, 6, 6, None)
    two = one._replace(busiest=None)
    assert _as_recorded(cause, [one, one], 2).other.received == 24
    for sent, calls in (([one, two], 1), ([one], None), ([one], 5)):
        found = _as_recorded(cause, sent, calls)
        assert found.other.received is None
        assert _mark(found, 8) == " (the bytes that the op receives now are unknown)"


def with_gradient(y, placement):
    """The gradient of y comes so, whatever its values."""

    def placed(gradient):
        if placement.is_partial():
            return DTensor.from_local(gradient.full_tensor(), gradient.device_mesh, [placement])
        return gradient.redistribute(placements=[placement])

    y.register_hook(placed)
    y.sum().full_tensor().backward()


def product_with_a_gradient_of_columns(mesh, x_placement):
    shapes = (8, 4), (4, 12)
    x, w = (DTensor.from_local(torch.ones(shape), mesh, [Replicate()]) for shape in shapes)
    x = x.redistribute(placements=[x_placement]).detach()
    with cute_sharding.profile() as p:
        y = x @ w.requires_grad_()
        with_gradient(y, Shard(1))
    return [line.cause for line in p.lines if line.events and line.cause.op == "mm"]


def test_a_gradient_names_the_operand_of_its_forward_op(mesh):
    """And if that lies as is said, the gradient sends nothing, and no more the op itself."""
    (cause,) = product_with_a_gradient_of_columns(mesh, Shard(0))
    assert cause.backward
    hint = f"mm sends nothing if operand 0 of mm in line {cause.place.line} is [R]"
    assert cause.todo[0].startswith(f"{hint}, and the gradient of its result [S(1)]; a redistr")
    assert "receives 96 B, in addition to the gradient" in cause.todo[0]
    assert product_with_a_gradient_of_columns(mesh, Replicate()) == []


@pytest.mark.parametrize("settings", [None, {}, {"redistribution": True}], ids=str)
def test_what_a_way_around_receives_is_what_it_receives(mesh, settings):
    """Redistributed as the program would: with the package off, on CPUs PyTorch gathers."""
    x = tensor(mesh, (8, 12), 1)
    on = nullcontext() if settings is None else cute_sharding.enabled(**settings)
    with on:
        with cute_sharding.profile() as p:
            x.log_softmax(1)
        with cute_sharding.profile() as followed:
            x.redistribute(placements=[Shard(0)])
    (cause,) = [line.cause for line in p.lines if line.events]
    (way,) = [each for each in cause.todo if "[S(0)]" in each]
    received = sum(event.received for line in followed.lines for event in line.events)
    assert f"receives {received:,} B" in way


def test_a_gradient_names_how_that_of_the_result_has_to_lie(mesh):
    x = tensor(mesh, (8, 12), 1).requires_grad_()
    with cute_sharding.profile() as p:
        y = x.exp()
        with_gradient(y, Partial())
    (cause,) = [line.cause for line in p.lines if line.events and line.cause.op == "mul"]
    at = cause.place.line
    assert cause.backward
    (said,) = [todo for todo in cause.todo if "the gradient of the result of exp" in todo]
    assert f"the gradient of the result of exp in line {at} is [S(1)]" in said
    call = "register_hook(lambda grad: grad.redistribute(placements=[Shard(1)]))"
    assert f"call {call} on this result, which receives 288 B" in said
