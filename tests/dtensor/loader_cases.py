"""What test_loads_of_engines.py runs in one process: what loaders do to tensors, beside the same
loader on whole ones.
"""

import copy

import numpy
import torch
import torch.distributed as dist
from torch import nn

from cute_sharding import plan_load
from cute_sharding.relations import NotOnlyMoved

WEIGHTS = {
    "a": torch.rand(4),
    "b": torch.rand(4, 3),
    "s": torch.tensor(5.0),
    "q": torch.rand(4, 4).to(torch.float8_e4m3fn),
    "c": torch.rand(4, dtype=torch.complex64),
}


def windows(x):
    return x.unfold(0, 2, 1)


def engine():
    return {
        "v": torch.zeros(4),
        "u": torch.zeros(4),
        "m": torch.zeros(6, 3, dtype=torch.bfloat16),
        "s": torch.zeros(()),
        "q": torch.zeros(4, 4, dtype=torch.float8_e4m3fn),
        "c": torch.zeros(4, dtype=torch.complex64),
        "map": torch.tensor([-1, 2]),
    }


def pairs(i, w):
    for name, x in ((name, x.cpu()) for name, x in w.items()):
        if name == "a":
            i["v"].copy_(x.to("cpu", non_blocking=True))


def rows(i, w):
    i["m"][torch.tensor([5, 0, 2, 3])] = w["b"].to(torch.bfloat16)
    i["m"][1].fill_(2)
    i["m"][4].zero_()


def masks(i, w):
    mask = torch.tensor([True, False, True, True])
    i["v"][mask] = w["a"][mask]
    i["m"].narrow(0, 0, 3).copy_(w["b"][mask])


def buffers(i, w):
    memory = torch.empty(64, dtype=torch.uint8)
    memory[16:32].copy_(w["a"].contiguous().view(torch.uint8))
    i["u"].copy_(memory[16:32].view(torch.float32).flip(0))


def scalars(i, w):
    i["s"].copy_(w["s"])
    i["v"][1], i["v"][0] = w["b"][2, 1], w["s"]


def turned(i, w):
    i["q"].copy_(w["q"].t())
    i["m"].data[2:].copy_(w["b"])


def one_from_another(i, w):
    i["v"].copy_(w["a"])
    i["u"].copy_(i["v"])
    i["u"][2:] = i["v"][:2]


def copied(i, w):
    i["v"].copy_(copy.deepcopy(w["a"]).clone().detach())
    i["u"].copy_(torch.index_select(w["a"], 0, torch.tensor([3, 3, 0, 1])))


@torch.inference_mode()
def inferred(i, w):
    i["v"].copy_(w["a"])


def foreach(i, w):
    torch._foreach_copy_([i["v"], i["u"]], [w["a"], w["a"]])
    torch._foreach_zero_([i["v"][1:2], i["u"][:1]])


def functional(i, w):
    i["v"].copy_(torch.slice_scatter(torch.ones(4), w["a"][1:3], 0, 0, 2))
    i["u"].copy_(torch.select_scatter(w["a"], w["s"], 0, 3))


def own_values(i, w):
    rows = torch.zeros(2, dtype=torch.int64).add_(2).tolist()
    i["v"].narrow(0, 0, rows[0]).copy_(w["a"][torch.tensor([3, 1]).tolist()[1] :][:2])


def onto_itself(i, w):
    i["v"].copy_(w["a"])
    try:
        i["v"][1:] = i["v"][:-1]
    except RuntimeError:  # torch copies to no memory that it reads
        i["v"][1:] = i["v"][:-1].clone()


def filled(i, w):
    """As vLLM loads tensors of one element."""
    i["s"].data.fill_(w["s"].item())
    i["v"][:1] = w["a"][2:3].item()
    torch.split_copy(w["a"], 2, out=[i["u"][:2], i["u"][2:]])


def own_on_the_weights_device(i, w):
    device = w["a"].device
    i["v"].copy_(w["a"][torch.arange(3, -1, -1, device=device)])
    i["u"].copy_(w["a"][[2, 0, 1, 3]] if torch.tensor(1, device=device) else w["a"])
    i["s"].copy_(w["s"].new_tensor(4.0))
    i["m"][[0, 2]] = w["b"][numpy.array([1, 3])].to(torch.bfloat16)
    for k in range(2):  # a table of the engine
        if i["map"][k].item() >= 0:
            i["m"][3 + k].copy_(w["b"][i["map"]][k])


def retyped(i, w):
    """Casts of casts, and bits of the same width."""
    i["v"].copy_(w["a"].half().float().flip(0))
    i["u"][1:3] = w["a"].to(torch.bfloat16)[::2]
    i["m"][:4].copy_(w["b"].to(torch.float8_e4m3fn).float()[:, [2, 0, 1]])
    i["q"].view(torch.uint8).T.copy_(w["q"].view(torch.uint8))
    i["s"].copy_(w["s"].to(torch.float8_e5m2).view(torch.uint8))


MOVED = [
    retyped,
    filled,
    own_on_the_weights_device,
    onto_itself,
    pairs,
    rows,
    masks,
    buffers,
    scalars,
    turned,
    one_from_another,
    copied,
    inferred,
    foreach,
    functional,
    own_values,
]


def added(i, w):
    i["v"].copy_(w["a"])
    i["v"].add_(w["b"][:, 0])
    i["v"][0].zero_()


def with_own(i, w):
    own = torch.ones(4)
    i["v"].copy_(w["a"] * own)
    own.fill_(3)
    i["u"].copy_(w["a"] * own)


def chosen(i, w):
    i["v"].copy_(torch.where(torch.tensor([True, False, True, False]), w["a"], torch.zeros(4)))


def scaled(i, w):
    scale = w["b"].abs().amax(0, keepdim=True)
    i["m"][2:].copy_((w["b"] / scale).T.contiguous().T)
    i["u"][:3] = scale[0].flip(0)


compiled_function = torch.compile(lambda x: x.mT * 2, backend="eager")


def compiled(i, w):
    i["m"].narrow(0, 0, 4).copy_(compiled_function(w["b"]).mT)


def in_another_default_dtype(i, w):
    torch.set_default_dtype(torch.bfloat16)
    try:
        i["v"].copy_((w["a"] * 10).int() / 7)
    finally:
        torch.set_default_dtype(torch.float32)


def strided(i, w):
    wide = w["b"].t().repeat(1, 50)
    i["u"][:3].copy_(wide[:, ::2].sum(1))
    i["v"][:3].copy_(wide[:, :1].expand(3, 200).sum(1))


def quantized(i, w):
    narrow = (w["b"] * 100).round().to(torch.int8)
    i["m"][:4].copy_(narrow.float() * 0.01)
    i["u"][:3].copy_((w["b"][0] * 2).to(torch.float8_e4m3fn).view(torch.uint8))


COMPUTED = [quantized, added, compiled, with_own, chosen, scaled, in_another_default_dtype, strided]


def assert_loads(load, **how):
    mine, by_hand = engine(), engine()
    plan = plan_load(lambda w: load(mine, w), mine, WEIGHTS, **how)
    assert all(torch.equal(bits(x), bits(y)) for x, y in zip(mine.values(), engine().values()))
    plan.run(WEIGHTS)
    load(by_hand, WEIGHTS)
    for name, x in mine.items():
        assert torch.equal(bits(x), bits(by_hand[name])), (name, x, by_hand[name])


def bits(x):
    return x.reshape(-1).view(torch.uint8)


def write():
    for load in MOVED:
        assert_loads(load)


def compute():
    for load in COMPUTED:
        assert_loads(load, computes=True)
        mine = engine()
        words = [f"{load.__name__}", "loader_cases.py:", "computes=True"][1:]
        raises(
            words, lambda load=load, mine=mine: plan_load(lambda w: load(mine, w), mine, WEIGHTS)
        )


def raises(words, function):
    try:
        function()
    except NotOnlyMoved as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"nothing is said of {words} by {function.__defaults__}")


def in_autocast(i, w):
    with torch.autocast("cpu", torch.bfloat16):
        i["m"][:4, :].copy_(w["b"] @ w["b"].T[:, :3])


def listed(i, w):
    own = torch.zeros(4)
    own.copy_(w["a"])
    i["v"][int(own.tolist()[0])].copy_(w["s"])


def by_numpy(i, w):
    i["v"].copy_(w["a"])
    i["v"].numpy()[0] = 9


def caught(i, w):
    """With values, it would go on another way than without."""
    try:
        scale = float(w["s"])
    except Exception:
        scale = 1.0
    i["v"].fill_(scale)


def staged(i, w):
    memory = numpy.zeros(4, dtype=numpy.float32)
    torch.from_numpy(memory).copy_(w["a"])
    i["v"].copy_(torch.from_numpy(memory))


def handed_out(i, w):
    own = torch.zeros(4)
    memory = own.numpy()
    own[:2].copy_(w["a"][:2])
    memory[2:] = 7
    i["v"].copy_(own)


def once(i, w):
    seen = {}
    for name in ("a", "b"):
        seen.setdefault(w[name].data_ptr(), name)
    i["v"].copy_(w["a"])
    if len(seen) > 1:
        i["m"][:3].copy_(w["b"])


KEPT = {}


def kept(i, w):
    KEPT["a"] = torch.zeros(4)
    KEPT["a"].copy_(w["a"])


def before_it(i, w, own=torch.zeros(4)):  # noqa: B008
    own.copy_(w["a"])


def summed_in_bfloat16(i, w):
    torch.sum(w["b"], 0, out=i["m"][0])


def sent(i, w):
    own = w["a"].clone()
    dist.all_reduce(own)
    i["v"].copy_(own)


def without_a_value(i, w):
    padded = torch.empty(6)
    padded[:4] = w["a"]
    i["v"].copy_(padded[1:5])


def table_written(i, w):
    i["v"][i["map"][1].item()].copy_(w["s"])
    i["map"].fill_(0)


REFUSED = {
    "no value": (without_a_value, "1 of the 4 elements of a tensor of shape (4,) have no value"),
    "a number": (lambda i, w: i["v"].fill_(w["s"].item() * 2), "reads the values of 's'"),
    "a number in if": (lambda i, w: w["s"].item() > 2 and i["v"].zero_(), "reads the values of"),
    "table": (table_written, "reads values of 'map', which it also writes to"),
    "caught": (caught, "reads the values of 's'"),
    "numpy's memory": (staged, "writes 'a' to a tensor of shape (4,)"),
    "handed out": (handed_out, "shares its memory with another library"),
    "pointers": (once, "with Tensor.data_ptr"),
    "kept": (kept, "keeps elements of 'a' in a tensor of its own"),
    "made before": (before_it, "since it was made before"),
    "turned": (lambda i, w: (i["q"].t_(), i["q"].copy_(w["q"].t())), "memory or shape as 'q'"),
    "out": (summed_in_bfloat16, "no element of the weights ('b')"),
    "collective": (sent, "which communicates"),
    "conjugate": (lambda i, w: i["c"].copy_(w["c"].conj()), "lazy conjugate"),
    "onto conjugate": (lambda i, w: i["c"].conj().copy_(w["c"]), "lazy conjugate"),
    "onto windows": (lambda i, w: windows(i["v"]).copy_(windows(w["a"])), "lie at one place"),
    "windows": (
        lambda i, w: windows(i["v"]).copy_(windows(w["a"]).select_scatter(w["a"][:2], 0, 2)),
        "lie at one place",
    ),
    "tolist": (listed, "reads the values of 'a' with Tensor.tolist"),
    "numpy of its own": (by_numpy, "with Tensor.numpy"),
    "if": (lambda i, w: i["v"].copy_(w["a"] if w["a"].max() > 0 else w["a"] * 2), "reads the valu"),
    "numpy": (lambda i, w: torch.from_numpy(w["a"].numpy()), "of 'a' with Tensor.numpy"),
    "set_": (lambda i, w: i["v"].set_(w["a"]), "writes to other memory"),
    "data": (lambda i, w: setattr(i["v"], "data", w["a"]), "param.data.copy_"),
    "its own": (lambda i, w: i["v"].add_(w["a"]), "no element of the weights"),
    "noise": (lambda i, w: i["v"].copy_(w["a"] + torch.rand(4) * 2), "no element of the weights"),
    "autocast": (lambda i, w: in_autocast(i, w), "no element of the weights"),
    "random": (lambda i, w: i["v"].copy_(torch.rand_like(w["a"])), "no element of the weights"),
}


def refuse():
    for load, words in REFUSED.values():
        mine = engine()

        def planned(load=load, mine=mine):
            plan_load(lambda w: load(mine, w), mine, WEIGHTS, computes=True)

        raises([words], planned)
        assert all(torch.equal(bits(x), bits(y)) for x, y in zip(mine.values(), engine().values()))
        assert [x.shape for x in mine.values()] == [x.shape for x in engine().values()]


def modules():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3, bias=False))
    model[2].weight = nn.Parameter(model[0].weight.data.mT)  # tied
    weights = {
        name: torch.rand_like(x) if x.is_floating_point() else x + 5
        for name, x in model.state_dict().items()
    }
    weights["2.weight"] = weights["0.weight"].mT
    plan = plan_load(model.load_state_dict, model, weights)
    # The last write of the tied weight is what counts.
    assert not plan.unwritten and plan.unread == {"0.weight": 12}
    plan.run(weights)
    for name, x in model.state_dict().items():
        assert torch.equal(x, weights[name])


def one_memory():
    """Tensors of an engine in one memory, of several dtypes, and written to in part."""
    memory = torch.zeros(64, dtype=torch.uint8)
    into = {
        "a": memory[:16].view(torch.float32),
        "b": memory[16:40].view(torch.bfloat16).view(3, 4),
        "rest": memory[40:],
    }

    def load(w):
        into["a"][1:].copy_(w["a"][1:])
        into["b"].copy_(w["b"].mT)

    plan = plan_load(load, into, WEIGHTS)
    assert plan.unwritten == {"a": 1, "rest": 24}
    plan.run(WEIGHTS)
    assert torch.equal(into["a"][1:], WEIGHTS["a"][1:]) and into["a"][0] == 0
    assert torch.equal(into["b"], WEIGHTS["b"].mT.to(torch.bfloat16)) and not into["rest"].any()


def exactly():
    """Constants as they are, rows that exist, and what lies at an offset."""
    wide = torch.zeros(4, dtype=torch.float64)
    plan = plan_load(lambda w: wide.fill_(0.1), {"x": wide}, {})
    plan.run({})
    assert bool((wide == 0.1).all())
    zeros = torch.ones(2)
    plan = plan_load(lambda w: zeros.copy_(torch.tensor([0.0, -0.0])[1:]), {"x": zeros}, {})
    plan.run({})
    assert str(zeros.tolist()) == "[-0.0, -0.0]"
    memory = torch.zeros(6)
    part = memory[2:]
    plan = plan_load(lambda w: part.copy_(w["a"] * 2), {"x": part}, WEIGHTS, computes=True)
    plan.run(WEIGHTS)
    assert torch.equal(memory, torch.cat([torch.zeros(2), WEIGHTS["a"] * 2]))
    into = engine()
    raises(["writes to 'v'"], lambda: plan_load(lambda w: past_the_end(into, w), into, WEIGHTS))
    odd = torch.zeros(7, dtype=torch.uint8)
    into = {"a": odd[:6].view(torch.int16), "b": odd[6:]}
    weights = {"x": torch.ones(1, dtype=torch.uint8), "y": torch.ones(3, dtype=torch.int16)}

    def load(w):
        into["b"].copy_(w["x"])
        into["a"].copy_(w["y"])

    plan = plan_load(load, into, weights)
    plan.run(weights)
    assert odd.tolist() == [1, 0, 1, 0, 1, 0, 1] and not plan.unwritten


def past_the_end(i, w):
    i["v"][torch.tensor([7])] = w["a"][:1]


def put_back():
    for assign in (True, False):
        model = nn.Linear(3, 4)
        weight, bias = model.weight, model.bias
        weights = {name: torch.rand_like(x) for name, x in model.state_dict().items()}

        def load(w, model=model, assign=assign):
            if assign:
                model.load_state_dict(w, assign=True)
            else:
                model.weight = nn.Parameter(w["weight"])

        words = ["another tensor, memory or shape as 'weight'"]
        raises(
            words, lambda load=load, model=model, weights=weights: plan_load(load, model, weights)
        )
        assert model.weight is weight and model.bias is bias and not weight.is_meta


def one_memory_of_numpy():
    """Of which torch does not know that it is one."""
    memory = numpy.zeros(6, dtype=numpy.float32)
    into = {"x": torch.from_numpy(memory[:4]), "y": torch.from_numpy(memory[2:])}
    try:
        plan_load(lambda w: into["x"].copy_(w["a"]), into, WEIGHTS)
    except ValueError as error:
        assert "'x' and 'y' of into share memory" in str(error)
    else:
        raise AssertionError("two tensors share memory")


CASES = (write, compute, refuse, modules, one_memory, one_memory_of_numpy, exactly, put_back)
