"""Functions of torch that raise for placements other than they are told: given what slices and
views leave cut here, and torch's own replicate, they go on as on torch.
"""

import given_placements_worker
import pytest
from test_processes import run

pytestmark = pytest.mark.processes


def test_loss_parallel_of_next_tokens(tmp_path):
    run(4, tmp_path, (given_placements_worker.next_tokens,))


def test_local_map_of_what_stays_cut(tmp_path):
    run(4, tmp_path, (given_placements_worker.mapped,))
