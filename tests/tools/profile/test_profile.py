"""What a profile says of a program whose communication is known."""

import json
import linecache
from dataclasses import replace
from html import escape
from html.parser import HTMLParser

import pytest
import torch
from profiled import ON, program, tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.parallel import RowwiseParallel, loss_parallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.functional import cross_entropy

import cute_sharding
from cute_sharding import StepPlan
from cute_sharding.programs.plan import PlannedOp, Totals


@pytest.fixture
def mesh():
    return init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def line_of(p, op):
    (line,) = [line for line in p.lines if line.cause.op == op]
    return line


def test_what_is_recorded_of_a_slice(mesh):
    x = tensor(mesh, (8, 6), 0)
    with cute_sharding.profile() as off:
        program(x)
    with cute_sharding.enabled(**ON), cute_sharding.profile() as on:
        program(x)
    # PyTorch gathers 6 of 8 rows of 6 floats; of rows 1 to 4 the busiest rank lacks one.
    before, after = line_of(off, "slice"), line_of(on, "slice")
    assert before.received == 6 * 6 * 4 and after.received == 6 * 4
    assert before.kinds == {"all-gather": 1} and after.kinds == {"all-to-all": 1}
    assert before.over == after.over == ["tp"]
    assert before.cause.kind == after.cause.kind == "op"
    assert before.cause.operands == after.cause.operands == ("(8, 6) [S(0)]",)
    assert before.cause.results == ("(4, 6) [R]",) and after.cause.results == ("(4, 6) [S(0)]",)
    assert before.cause.text == (
        "slice redistributes a tensor of (8, 6) from [S(0)] to [R], by PyTorch's rule"
    )
    assert after.cause.text == (
        "slice communicates, from (8, 6) [S(0)] to (4, 6) [S(0)], by cute_sharding's rule for "
        "movement ops"
    )


def test_a_redistribution_that_the_program_asks_for(mesh):
    x = tensor(mesh, (8, 6), 0)
    with cute_sharding.profile() as p:
        program(x)
    line = line_of(p, "redistribute")
    assert (line.cause.kind, line.cause.rule) == ("asked", "program")
    (moved,) = line.cause.moved
    assert (moved.shape, moved.before, moved.after) == ((8, 6), ("S(0)",), ("R",))
    assert line.kinds == {"all-gather": 1} and line.received == 6 * 6 * 4
    assert line.cause.text == ("redistribute() redistributes a tensor of (8, 6) from [S(0)] to [R]")


def test_what_sends_nothing_has_no_line(mesh):
    x = tensor(mesh, (8, 8), 1)
    with cute_sharding.enabled(**ON), cute_sharding.profile() as p:
        x.view(4, 16)
    assert p.lines == () and p.collectives == []


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
    assert "profiled.py:" in text and "from [S(0)] to [R]" in text
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
    assert {line["op"]: line["rule"] for line in data["lines"]} == {
        "slice": "PyTorch",
        "redistribute": "program",
    }

    trace = json.loads(p.save(tmp_path / "trace.json").read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [event["cat"] for event in events] == ["all-gather"] * 2
    assert all(event["dur"] > 0 and event["args"]["line"].startswith("/") for event in events)
    texts = {line.cause.text for line in p.lines}
    assert {event["args"]["text"] for event in events} == texts

    page = p.save(tmp_path / "page.html").read_text()
    opened = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: opened.append(tag)
    parser.feed(page)
    assert "table" in opened
    assert not {"link", "img", "iframe"} & set(opened) and "src=" not in page
    assert all(escape(text) in page for text in texts)
    assert p.save(tmp_path / "table.txt").read_text().startswith("Rank 0 of 8")
    with pytest.raises(ValueError, match=r"file name for the profile that ends in one of \.json"):
        p.save(tmp_path / "page.pdf")


def planned_on(*lines):
    """A plan in which each of these lines has an op that changes."""
    ops = [
        PlannedOp("aten.mm.default", (0, i), {}, (i,), ("[R]", None), (False,) * 2, (None,))
        for i in range(len(lines))
    ]
    ops = [replace(op, line=of, before=5_510_000, after=721_000) for op, of in zip(ops, lines)]
    totals = {"op by op": Totals(5_510_000, 9), "planned": Totals(721_000, 1)}
    alone = {lines[0]: Totals(4_200_000, 3)}
    return StepPlan("a.py:step", (8,), None, (), (), tuple(ops), totals, alone=alone)


def test_lines_of_a_plan_say_what_it_saves(mesh, tmp_path):
    x = tensor(mesh, (8, 6), 0)
    with cute_sharding.profile() as p:
        program(x)
    whole = "{0.file}:{0.line}".format(line_of(p, "slice").cause.place)
    name = whole.rpartition("/")[2]
    said = "By the plan of the step, this line receives 721 kB in place of 5.51 MB."
    alone = f"{said} If it alone changes, the step saves 4.2 MB and 3 collectives."
    for lines, text in (
        ([f"/elsewhere/{name}"], alone),
        ([f"/elsewhere/{name}", whole], said),  # the line itself is known
        ([f"/elsewhere/{name}", f"/other/{name}"], None),  # either may be meant
        ([f"/elsewhere/{name}1"], None),
    ):
        planned_on(*lines).save(tmp_path / "plan.json")
        with cute_sharding.profile(plan=tmp_path / "plan.json") as p:
            program(x)
        planned = {line.cause.op: line.planned and line.planned.text for line in p.lines}
        assert planned == {"slice": text, "redistribute": None}
        data = {line["op"]: line["planned"] for line in p.to_dict()["lines"]}
        assert (data["slice"] and data["slice"]["text"]) == text
        for shown in (joined(p.table(100)), p.html()):
            assert shown.count("By the plan of the step, this line") == (text is not None)
            assert text is None or text in shown
    still = planned_on(whole).only()  # a plan that changes nothing
    with cute_sharding.profile(plan=still) as p:
        program(x)
    assert not any(line.planned for line in p.lines)
    with pytest.raises(ValueError, match="is no plan of a step"):
        (tmp_path / "plan.json").write_text("{}")
        with cute_sharding.profile(plan=str(tmp_path / "plan.json")):
            pass


def test_what_to_change_first_is_what_was_counted_of_each_line(mesh):
    counted = {"a.py:7": Totals(100, 0), "a.py:8": Totals(3_000, 2), "a.py:9": Totals(-5, 1)}
    plan = replace(planned_on(*counted, "a.py:4"), alone={**counted, "a.py:4": None})
    with cute_sharding.profile(plan=plan) as p:
        pass
    assert p.table(90).splitlines()[-7:] == [
        "Change this first, by the plan of a.py:step on mesh (8), which op by op receives 5.51 MB",
        "  in 9 collectives:",
        "  a.py:8  saves 3 kB (0.0544 %) and 2 collectives",
        "    aten.mm.default reads operand 0 as [R]",
        "  a.py:7  saves 100 B (0.00181 %)",
        "    aten.mm.default reads operand 0 as [R]",
        "  The whole plan saves 4.79 MB (86.9 %) and 8 collectives.",
    ]
    data = json.loads(json.dumps(p.to_dict()))["planned"]
    assert data["saved"] == {"received": 4_789_000, "collectives": 8, "seconds": None}
    assert [line["alone"]["received"] for line in data["lines"]] == [3_000, 100]
    page = p.html()
    assert page.index("saves 3 kB") < page.index("saves 100 B") < page.index("The whole plan")


def test_a_plan_that_counted_no_line_alone_says_so(mesh):
    with cute_sharding.profile(plan=replace(planned_on("a.py:8"), alone={})) as p:
        pass
    assert "  a.py:8  5.51 MB -> 721 kB" in p.table(100).splitlines()
    assert "plan-step --each-line also counts what each saves alone" in joined(p.table(100))
    with cute_sharding.profile(plan=planned_on("a.py:8").only()) as p:
        pass
    assert "The plan of a.py:step on mesh (8) changes no line." in str(p)


def test_the_page_begins_with_charts(mesh):
    x = tensor(mesh, (8, 6), 0)
    with cute_sharding.profile() as p:
        program(x)
    page = p.html()
    charts, table = page.partition("<table")[::2]
    assert charts.count("<figure") == 2 and "<figure" not in table
    asked = str(line_of(p, "redistribute").cause.place)
    assert asked in charts and "144 B in 1 collective" in charts
    # both lines receive the same, so both bars fill the width; and each has a span of time
    assert charts.count('x="0.00%" width="100.00%"') == 2
    assert charts.count("<title>all-gather, 144 B, ") == 2
    assert 'aria-label="tp"' in charts


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


def test_what_is_on_is_said_where_nothing_ran(mesh):
    x = tensor(mesh, (8, 6), 0)
    on = "cute_sharding is on (views, ops, redistribution, movement)."
    with cute_sharding.enabled(**ON):
        with cute_sharding.profile() as nothing:
            pass
        with cute_sharding.profile() as asked:
            x.redistribute(placements=[Replicate()])  # of DTensor's ops none runs
    assert on in joined(str(nothing)) and on in joined(str(asked))


def test_two_profiles_are_compared(mesh):
    x = tensor(mesh, (8, 6), 0)

    def step():
        x.full_tensor()
        return x[1:5]

    with cute_sharding.profile() as off:
        step()
    with cute_sharding.enabled(**ON), cute_sharding.profile() as on:
        step()
    rows = [line.split("  ") for line in off.compare(on).splitlines()]
    head, first, second, total = [[cell.strip() for cell in row if cell] for row in rows]
    assert head == ["line", "cute_sharding off", "cute_sharding on"]
    line = step.__code__.co_firstlineno
    assert first == [f"test_profile.py:{line + 2}", "144 B in 1, 6 us", "24 B in 1, 6 us"]
    assert second[0] == f"test_profile.py:{line + 1}" and second[1] == second[2]
    assert total == ["in all", "288 B in 2, 12 us", "168 B in 2, 12 us"]
    assert off.compare(off).split()[1:3] == ["this", "other"]
    empty = cute_sharding.Profile(torch_version="2")
    assert "144 B in 1, 6 us  0 B" in " ".join(off.compare(empty).split()).replace(" 0 B", "  0 B")


def test_a_profile_without_its_block_says_what_to_write():
    p = cute_sharding.profile()
    assert 'Write "with cute_sharding.profile() as p:"' in str(p)
    with pytest.raises(AttributeError, match=r"profile\(\) itself has no 'table'"):
        p.table()
    with pytest.raises(AttributeError, match=r"has no attribute 'tables'"):
        p.tables()
    with p as early:
        assert str(early) == (
            "This profile is filled when its with block ends: read it after the block."
        )
    assert "No communication." in str(early)


def test_the_rows_of_a_line_are_counted(mesh):
    x = tensor(mesh, (8, 6), 0)
    with cute_sharding.profile() as p:
        _ = x[1:5], x[2:5]
    assert "2 collectives on 1 line of the program: " in joined(str(p))
    assert "and 1 more row: 144 B received in 1 collective" in p.table(100, most=1)


# -- which rule decided, and on which tensors ------------------------------------------------------


def made(mesh, shape, placement):
    """A tensor of that global shape; what its elements are does not matter."""
    local = list(shape)
    if isinstance(placement, Shard):
        local[placement.dim] //= 4
    return DTensor.from_local(torch.ones(local), mesh, [placement], run_check=False)


def causes(run):
    with cute_sharding.profile() as p:
        run()
    return [line.cause for line in p.lines]


def test_the_rule_that_decided_is_named(mesh):
    heads = made(mesh, (4, 8), Shard(1))  # 2 heads of 4 elements
    square = made(mesh, (8, 8), Shard(0))
    rows, strided = (
        made(mesh, (8, 6), Shard(0)),
        made(mesh, (8, 6), _StridedShard(0, split_factor=2)),
    )

    def rule(run):
        (cause,) = causes(run)
        return cause.rule

    with cute_sharding.enabled(**ON):
        assert rule(lambda: heads.view(4, 2, 4)) == "view"
        assert rule(lambda: rows.roll(1, 0)) == "movement"
        assert rule(lambda: strided.softmax(0)) == "signature"
        assert rule(lambda: strided.bernoulli()) == "fallback"
        assert rule(lambda: torch._foreach_copy_([square], [square.T])) == "signature"
        assert rule(lambda: rows.cumsum(0)) == "signature"
        assert rule(lambda: rows.argmax(0)) == "signature"
    assert rule(lambda: rows.argmax(0)) == "PyTorch"  # by a function of its own
    assert rule(lambda: rows.cumsum(0)) == "PyTorch"


@torch.library.custom_op("profiled::own", mutates_args=())
def own(x: torch.Tensor) -> torch.Tensor:
    return x + 1


own.register_fake(torch.empty_like)


def test_the_rule_of_the_program_is_named(mesh):
    register_sharding(torch.ops.profiled.own.default)(lambda x: [([Replicate()], [Replicate()])])
    with cute_sharding.enabled(**ON):
        (cause,) = causes(lambda: own(made(mesh, (8, 6), Shard(0))))
    assert cause.text == (
        "profiled::own redistributes a tensor of (8, 6) from [S(0)] to [R], by a rule that the "
        "program registered"
    )


def test_the_other_operand_is_named(mesh):
    x, w = made(mesh, (8, 4), Partial()), made(mesh, (4, 8), Shard(1))
    (cause,) = causes(lambda: x @ w)
    assert cause.operands == ("(8, 4) [P(sum)]", "(4, 8) [S(1)]")
    assert cause.text == (
        "mm redistributes a tensor of (4, 8) from [S(1)] to [R], beside (8, 4) [P(sum)], by "
        "PyTorch's rule"
    )


def test_of_operands_that_lie_alike_one_or_both_are_redistributed(mesh):
    x = made(mesh, (8, 4), Partial())
    (one,), (both,) = causes(lambda: x * x), causes(lambda: torch.maximum(x, x))
    assert len(one.moved) == 1 and ", beside (8, 4) [P(sum)], by" in one.text
    assert len(both.moved) == 2 and "beside" not in both.text


def test_a_gradient_says_what_it_is(mesh):
    x = tensor(mesh, (8, 8), 0).requires_grad_()
    with cute_sharding.enabled(**ON), cute_sharding.profile() as p:
        rows = x[1:5]
        rows.redistribute(placements=[Shard(1)]).to_local().sum().backward()
    gradients = [line.cause for line in p.lines if line.cause.backward]
    forward = {line.cause.op: line.cause.place for line in p.lines if not line.cause.backward}
    assert {(cause.kind, cause.place) for cause in gradients} == {
        ("op", forward["slice"]),
        ("asked", forward["redistribute"]),
    }
    (asked,) = [cause for cause in gradients if cause.kind == "asked"]
    assert asked.text == (
        "the backward pass of redistribute() redistributes a tensor of (4, 8) from [S(1)] to [S(0)]"
    )


class Gathered(torch.autograd.Function):
    """The gradient is gathered."""

    forward = staticmethod(lambda ctx, x: x.view_as(x))
    backward = staticmethod(lambda ctx, g: g.redistribute(placements=[Replicate()]))


def test_who_calls_redistribute_is_named(mesh):
    x = tensor(mesh, (8, 8), 0).requires_grad_()
    (asked,) = causes(lambda: Gathered.apply(x).backward(torch.ones_like(x)))
    moved = "redistributes a tensor of (8, 8) from [S(0)] to [R]"
    assert asked.backward and asked.text == f"redistribute() {moved}"

    rows = RowwiseParallel(input_layouts=Replicate())
    layer = parallelize_module(torch.nn.Linear(8, 8, bias=False), mesh, rows)
    whole = torch.ones(4, 8, requires_grad=True)
    forward, backward = causes(lambda: layer(whole).sum().backward())
    styles = "redistribute() in torch.distributed.tensor.parallel.style redistributes"
    assert forward.text.startswith(f"{styles} a tensor of (4, 8) from [P(sum)] to [R]")
    assert backward.text.startswith("the backward pass of redistribute() redistributes")
    for each in (forward, backward):
        assert "layer(whole)" in linecache.getline(each.place.file, each.place.line)


def test_a_function_of_torchs_own_is_named_also_with_a_plain_operand(mesh):
    scores = tensor(mesh, (4, 8), 1).requires_grad_()
    with loss_parallel():
        found = causes(lambda: cross_entropy(scores, torch.zeros(4, dtype=torch.long)).backward())
    assert {(cause.op, cause.rule) for cause in found} == {
        ("_log_softmax", "PyTorch"),
        ("nll_loss_forward", "PyTorch"),
    }


def test_what_a_plan_redistributes_is_of_the_op_that_reads_it(mesh):
    """And not of the op before, at which DTensor looked last."""
    given = ((8, 6), "torch.float32", "[S(0)]", (4,), ("tp",))
    ops = [
        PlannedOp("aten.neg.default", ("%0",), {}, (1,), (None,), (False,), (None,)),
        PlannedOp("aten.exp.default", ("%1",), {}, (2,), ("[R]",), (False,), (None,)),
    ]
    plan = StepPlan("", (4,), ("tp",), (given,), (0,), tuple(ops), {})
    x = tensor(mesh, (8, 6), 0)
    with cute_sharding.enabled(**ON), cute_sharding.planned(plan), cute_sharding.profile() as p:
        y = x.neg()
        y.exp()
    (line,) = p.lines
    cause = line.cause
    assert (cause.kind, cause.op, cause.rule) == ("planned", "exp", "plan")
    assert "y.exp()" in linecache.getline(cause.place.file, cause.place.line)
    assert cause.text == (
        "the plan of the step redistributes a tensor of (8, 6) from [S(0)] to [R], for exp"
    )


def test_a_mesh_is_named_once():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with cute_sharding.profile() as p:
        made(mesh["tp"], (4, 8), Shard(0)).full_tensor()
        DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0), Shard(1)]).full_tensor()
    assert p.meshes == ("dp=2, tp=2",)


def test_what_fsdp_sends_is_under_its_name(mesh):
    model = torch.nn.Linear(8, 8, bias=False)
    fully_shard(model, mesh=mesh)
    found = causes(lambda: model(torch.ones(2, 8)).sum().backward())
    assert {(cause.op, cause.kind) for cause in found} == {("FSDP", "direct")}
    assert {cause.text for cause in found} == {"FSDP communicates outside of the ops of DTensors"}


def test_a_function_that_several_lines_call_says_which(mesh):
    def last(x):
        return x[:, -2:]

    x = made(mesh, (4, 8), Shard(1))
    with cute_sharding.profile() as p:
        last(x)
        for _ in range(2):
            last(x * 2)
    (line,) = p.lines
    (first, one), (then, two) = sorted(line.callers.items())
    assert (one, two) == (1, 2) and then.line == first.line + 2
    said = f"Called from {then} (2 collectives), {first} (1 collective)."
    assert said in " ".join(p.table(100).split())
    assert p.to_dict()["lines"][0]["collectives"][0]["caller"] == first._asdict()
    assert said.partition("from ")[0] in p.html()
    with cute_sharding.profile() as p:
        last(x)
    assert "Called from" not in p.table(100)
