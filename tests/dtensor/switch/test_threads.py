"""Threads whose caches nobody else can empty: what they have cached of torch's is not what they do
once ours is switched on, nor the other way round.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from simulation import distribute
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.tensor import Partial

import cute_sharding
from cute_sharding.dtensor.bookkeeping import kept
from cute_sharding.dtensor.replaced import op_schemas

pytestmark = pytest.mark.one_in(1)


@pytest.fixture
def worker():
    """Runs a function in another thread, always the same."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda function: pool.submit(function).result(timeout=60)


def test_other_threads_fill_what_is_pending(worker):
    """A pending sum that is filled holds that number, and not one for each device."""

    def filled():
        with LocalTensorMode(2):
            x = distribute(torch.ones(4), (2,), [Partial()])
            with suppress(RuntimeError):  # torch refuses to write to what is pending
                x.exp_()
            return torch.fill_(x, 8).full_tensor().reconcile()[0].item()

    for _ in range(2):
        assert worker(filled) == filled() == 16
        with cute_sharding.enabled():
            for empty in (lambda: None, kept.empty, op_schemas.clear_propagation_caches):
                empty()
                assert worker(filled) == filled() == 8


def test_other_threads_refuse_again_what_torch_refuses(worker):
    """They do not run what is cached of ours without what belongs to it: the write would be
    lost.
    """

    def written():
        with LocalTensorMode(2):
            x = distribute(torch.zeros(4), (2,), [Partial()])
            try:
                return x.exp_().full_tensor().reconcile()[0].item()
            except RuntimeError:
                return "refused"

    for _ in range(2):
        assert worker(written) == written() == "refused"
        with cute_sharding.enabled():
            assert worker(written) == written() == 1
    assert worker(written) == written() == "refused"
