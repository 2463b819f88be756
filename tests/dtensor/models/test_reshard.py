"""Whole models between meshes, on real processes."""

import pytest
import reshard_worker
from gloo import run


@pytest.mark.processes
@pytest.mark.one_in(1)
@pytest.mark.parametrize("prepared, limited", [(False, False), (True, False), (True, True)])
def test_drawn_models(prepared, limited, share, tmp_path):
    run(4, tmp_path, (reshard_worker.drawn_models, 0, share(200, 10), prepared, limited))
