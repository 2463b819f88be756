"""Whether a program is traced, as torch itself says, in every way to trace."""

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import _are_we_tracing
from torch.fx.experimental.proxy_tensor import make_fx

from cute_sharding.dtensor.replaced.dispatch_modes import is_tracing


def compiled(program):
    torch.compile(program, backend="eager", fullgraph=True)(torch.ones(2))


def faked(program):
    with FakeTensorMode():
        program(torch.ones(2))


def by_python(program):
    with enable_python_dispatcher():
        program(torch.ones(2))


WAYS = {
    "not at all": lambda program: program(torch.ones(2)),
    "proxies": lambda program: make_fx(program)(torch.ones(2)),
    "symbols": lambda program: make_fx(program, tracing_mode="symbolic")(torch.ones(2)),
    "before dispatch": lambda program: make_fx(program, pre_dispatch=True)(torch.ones(2)),
    "fake": faked,
    "python's dispatcher": by_python,
    "dynamo": compiled,
}


@pytest.mark.one_in(1)
@pytest.mark.parametrize("way", WAYS)
def test_as_torch_says(way):
    found = []

    def program(x):
        found.append((is_tracing(), _are_we_tracing()))
        return x + 1

    WAYS[way](program)
    WAYS["not at all"](program)
    expected = way != "not at all"
    assert found == [(expected, expected), (False, False)]
