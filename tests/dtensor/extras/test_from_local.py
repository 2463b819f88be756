"""from_local with run_check=True: local tensors that are not the shards of the shape that it is
given are refused, by all ranks alike. Without it, ops refuse them at the debug level DETAIL.
"""

import pytest
from from_local_programs import differing_specs, drawn_shards
from gloo import run


@pytest.mark.costly
@pytest.mark.processes
@pytest.mark.one_in(1)
def test_all_ranks_refuse(share, tmp_path):
    run(4, tmp_path, (drawn_shards, share(400, 10)))


@pytest.mark.costly
@pytest.mark.processes
@pytest.mark.one_in(1)
def test_ops_refuse_at_the_debug_level_detail(tmp_path):
    run(4, tmp_path, (differing_specs,))
