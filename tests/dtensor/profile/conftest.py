import pytest
from torch.distributed.device_mesh import init_device_mesh


@pytest.fixture
def mesh():
    return init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
