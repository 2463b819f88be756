"""Where a compiled program's graph breaks, ops run between graphs: what stands in for torch's own
functions is run there and never compiled, as torch's own is.
"""

import graph_breaks_worker
import pytest
from gloo import run

pytestmark = pytest.mark.processes


@pytest.mark.costly
def test_none_of_ours_is_compiled(tmp_path):
    run(2, tmp_path, (graph_breaks_worker.programs,))
