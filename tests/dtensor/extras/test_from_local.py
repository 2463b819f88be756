"""from_local with run_check=True: local tensors that are not the shards of the shape that it is
given are refused, by all ranks alike.
"""

import pytest
from from_local_programs import drawn_shards
from gloo import run


@pytest.mark.costly
@pytest.mark.processes
@pytest.mark.one_in(1)
def test_all_ranks_refuse(share, tmp_path):
    run(4, tmp_path, (drawn_shards, share(400, 10)))
