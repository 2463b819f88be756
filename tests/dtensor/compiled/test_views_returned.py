"""Views that leave a compiled program, and what views have made that goes into one."""

import pytest
import torch
from compiling import assert_same, compiled, flatten, fresh_compiler, sharded  # noqa: F401
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize(
    "program",
    [
        flatten,
        lambda x: x.transpose(0, 1),
        lambda x: x[:, None],
        lambda x: x.unsqueeze(1).expand(-1, 3, -1, -1),
        lambda x: (flatten(x), x.permute(2, 0, 1)),
        lambda x: x[:, :, 1:3],
        lambda x: x[2],
        lambda x: x[1:, :, ::3],
        lambda x: x[:, :, 4:5].transpose(0, 2),
        lambda x: x.unflatten(2, (3, 2))[:, :, 1].transpose(0, 1),
        lambda x: (x[0], x[..., 2]),
        lambda x: x.diagonal(0, 0, 2),
        lambda x: x.permute(1, 0, 2).unflatten(2, (3, 2))[..., 1].diagonal(0, 1, 2),
        lambda x: x.split(2, 2)[1],
        lambda x: (x, x[1:]),
    ],
    ids=[
        *("flatten", "transpose", "new dim", "expand", "two"),
        *("slice", "select", "steps", "one row", "heads", "two of some rows"),
        *("diagonal", "diagonal of heads", "part", "itself"),
    ],
)
def test_views_of_inputs_are_returned_with_their_gradients(program, dynamic):
    given, again = (sharded((3, 8, 6), [Shard(1)], grad=True) for _ in range(2))
    expected, actual = program(given), compiled(program, dynamic)(again)
    pairs = list(zip(actual, expected)) if isinstance(actual, tuple) else [(actual, expected)]
    for a, b in pairs:
        assert_same(a, b)
        assert (
            a.to_local().untyped_storage().data_ptr()
            == again.to_local().untyped_storage().data_ptr()
        )
        steps_of = [(m, k) for n, m, k in zip(a.shape, a.stride(), b.stride()) if n != 1]
        assert all(m == k for m, k in steps_of)
        assert_same(
            *(
                torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)[0]
                for y, x in ((a, again), (b, given))
            )
        )


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    "program",
    [
        lambda x: x[:, :, 1:3],
        lambda x: x[2],
        lambda x: x.diagonal(0, 0, 2),
        lambda x: x.unflatten(2, (3, 2))[:, :, 1].transpose(0, 1),
        lambda x: x.view(torch.int32),
        lambda x: x.view(torch.int32).transpose(0, 1),
        lambda x: x.transpose(0, 2).detach()[1:],
        lambda x: x.transpose(0, 2).detach(),
    ],
    ids=["slice", "select", "diagonal", "heads", "bits", "bits, transposed", "detached", "whole"],
)
def test_views_of_some_rows_and_of_bits_are_returned_where_autograd_does_not_look(program):
    given = sharded((3, 8, 6), [Shard(1)])
    expected, actual = program(given), compiled(program, False)(given)
    assert_same(actual, expected)
    given += 1  # both are views of it
    assert_same(actual, program(given))


@pytest.mark.parametrize("dynamic", [True, False])
def test_rows_of_results_are_views_of_these(dynamic):
    """Where a program goes on to write to them, and autograd looks."""

    def program(x):
        y = x * 2
        return y, y[1], y[:, :, 2:4]

    found = []
    for run in (program, compiled(program, dynamic)):
        x = sharded((3, 7, 6), [Shard(1)], grad=True)
        y, row, columns = run(x)
        row.mul_(x.detach()[0])
        columns.add_(1)
        (y * y).sum().backward()
        found.append((y.to_local(), row.to_local(), columns.to_local(), x.grad.to_local()))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("dynamic", [True, False])
def test_what_a_view_made_goes_into_a_compiled_program(dynamic):
    given = flatten(sharded((3, 8, 6), [Shard(1)])).clone()
    assert isinstance(given.placements[0], _StridedShard)
    assert_same(
        compiled(lambda x: x.view(3, -1, x.shape[1]) * 2, dynamic)(given),
        sharded((3, 8, 6), [Shard(1)]) * 2,
    )


@pytest.mark.one_in(1)
def test_what_is_pending_is_written_to_in_a_program_that_has_not_run_eagerly():
    def program(x):
        return torch.nn.functional.rms_norm(x, (6,))

    given = sharded((3, 8, 6), [Shard(2)], grad=True)
    actual = compiled(program, False)(given)
    assert_same(actual, program(given))


@pytest.mark.one_in(1)
@pytest.mark.parametrize("grad", [False, True])
def test_bits_of_a_slice_that_moved_are_not_returned(grad):
    """To autograd they are no view, so nobody knows how to take them again."""
    given = sharded((3, 8, 6), [Shard(1)], grad=grad)
    with cute_sharding.enabled(movement=True):
        with pytest.raises(Exception, match=r"Return view\.clone\(\)"):
            compiled(lambda x: x[:, 1:].view(torch.int32), False)(given)
        assert_same(
            compiled(lambda x: x[:, :, 1:].view(torch.int32), False)(given),
            given[:, :, 1:].view(torch.int32),
        )


@pytest.mark.one_in(1)
def test_what_torch_cannot_return_is_refused_with_what_to_do():
    given = sharded((3, 8, 6), [Shard(1)], grad=True)
    with pytest.raises(Exception, match=r"returns several views of the DTensor.*\.clone\(\)"):
        compiled(lambda x: (lambda y: (y[1:], y[:2]))(x * 2), False)(given)
