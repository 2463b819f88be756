"""A movement program beside one device: its values and gradients."""

import torch
from movement_programs import listed
from op_programs import assert_close, values
from simulation import distribute, is_partial, plain
from torch.distributed.tensor import Replicate

import cute_sharding


def on_one_device(function, full):
    with plain():
        x = full.clone().requires_grad_()
        results = listed(function(x))
        gradients = [values(*result.shape) + 0.5 for result in results]
        (gradient,) = torch.autograd.grad(results, x, gradients)
    return results, gradients, gradient


def compare(function, full, mesh, placements, case, **flags):
    wanted, gradients, gradient = on_one_device(function, full)
    terms = 1
    for n, p in zip(mesh, placements):
        terms *= n if is_partial(p) else 1
    with cute_sharding.enabled(movement=True, **flags):
        x = distribute(full / terms, mesh, placements, requires_grad=True)
        results = listed(function(x))
        given = [
            distribute(g, mesh, [Replicate() if is_partial(p) else p for p in result.placements])
            for g, result in zip(gradients, results)
        ]
        (found,) = torch.autograd.grad(results, x, given)
    for result, want in zip(results, wanted, strict=True):
        assert_close(result.detach(), want.detach(), case)
    assert_close(found, gradient, (case, "gradient"))
