"""Programs that never heard of this package: how a program may first import torch, and what it may
first use.
"""

IMPORTS = [
    "torch",
    "torch.nn",
    "torch.optim",
    "torch.compiler",
    "torch.export",
    "torch.fx",
    "torch.func",
    "torch.jit",
    "torch._dynamo",
    "torch._inductor",
    "torch._inductor.compile_fx",
    "torch._functorch.aot_autograd",
    "torch._higher_order_ops",
    "torch._export",
    "torch.fx.experimental.symbolic_shapes",
    "torch.utils.checkpoint",
    "torch.utils.data",
    "torch.profiler",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.rpc",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.device_mesh",
    "torch.distributed._tensor",
    "torch.distributed._composable",
    "torch.distributed._functional_collectives",
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.tensor",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.parallel",
    "torch.distributed.tensor.experimental",
    "torch.distributed.tensor._ops._view_ops",
    "torch.distributed.tensor._redistribute",
    "torch.multiprocessing.spawn",
    "torch.nn.parallel",
    "torch.nn.attention.flex_attention",
    "torch.ao.quantization",
    "torch.testing._internal.common_utils",
    "torch.testing._internal.common_distributed",
    "torch.testing._internal.distributed._tensor.common_dtensor",
]

PARAMETER = "import torch; p = torch.nn.Parameter(torch.ones(2)); p.grad = torch.ones(2); "
GROUP = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group('fake', rank=0, world_size=2, store=FakeStore())
"""

PROGRAMS = {
    "sgd": PARAMETER + "torch.optim.SGD([p], 0.1).step(); assert p[0] != 1",
    "adam": PARAMETER + "torch.optim.Adam([p]).step(); assert p[0] != 1",
    "adamw, foreach": PARAMETER + "torch.optim.AdamW([p], foreach=True).step(); assert p[0] != 1",
    "compile": (
        "import torch; assert torch.compile(lambda x: x + 1, "
        "backend='eager')(torch.ones(2)).tolist() == [2, 2]"
    ),
    "compile, aot": (
        "import torch; assert torch.compile(lambda x: x.view(2, 2) + 1, "
        "backend='aot_eager')(torch.ones(4)).shape == (2, 2)"
    ),
    "export": """
import torch
class Module(torch.nn.Module):
    def forward(self, x):
        return x.view(-1) + 1
assert torch.export.export(Module(), (torch.ones(2, 2),)).module()(torch.ones(2, 2)).shape == (4,)
""",
    "checkpoint": (
        "import torch; from torch.utils.checkpoint import checkpoint; x = torch.ones(2, "
        "requires_grad=True); checkpoint(torch.sin, x, use_reentrant=False).sum().backward(); "
        "assert x.grad is not None"
    ),
    "vmap": "import torch; assert torch.vmap(torch.sin)(torch.ones(3, 2)).shape == (3, 2)",
    "profiler": "import torch\nwith torch.profiler.profile(): torch.ones(2).sum()",
    "flex attention": (
        "import torch; from torch.nn.attention.flex_attention import flex_attention; "
        "flex_attention(*(torch.ones(1, 1, 16, 16) for _ in range(3)))"
    ),
    "serialization": (
        "import io, torch; f = io.BytesIO(); torch.save({'x': torch.ones(2)}, f); f.seek(0); "
        "assert torch.load(f)['x'].sum() == 2"
    ),
    "group, then dtensor": GROUP
    + """
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
x = DTensor.from_local(torch.ones(2, 3), init_device_mesh('cpu', (2,)), [Shard(0)])
assert x.view(12).shape == (12,)
""",
    "dtensor in a function": GROUP
    + """
def late():
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh
    x = DTensor.from_local(torch.ones(2, 3), init_device_mesh('cpu', (2,)), [Shard(0)])
    return x.full_tensor()
assert late().shape == (4, 3)
""",
    "spec asked for, then imported": """
import importlib.util, torch
assert importlib.util.find_spec('torch.distributed.tensor') is not None
import torch.distributed.tensor
""",
    "reloaded": (
        "import importlib, torch.distributed.tensor; importlib.reload(torch.distributed.tensor)"
    ),
    "lazily loaded": """
import importlib.util, sys, torch
spec = importlib.util.find_spec('torch._dynamo')
spec.loader = importlib.util.LazyLoader(spec.loader)
module = importlib.util.module_from_spec(spec)
sys.modules['torch._dynamo'] = module
spec.loader.exec_module(module)
module.reset()
""",
    "two threads": """
import importlib, threading, torch
names = ['torch._dynamo', 'torch.distributed.tensor']
gate, failed = threading.Barrier(len(names)), []
def load(name):
    gate.wait()
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed.append(error)
threads = [threading.Thread(target=load, args=(name,)) for name in names]
[thread.start() for thread in threads]
[thread.join(120) for thread in threads]
assert not failed and not any(thread.is_alive() for thread in threads), failed
""",
    "fork before": """
import os, torch
child = os.fork()
if child == 0:
    import torch._dynamo
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
""",
    "fork after": """
import os, torch.distributed.tensor
child = os.fork()
if child == 0:
    from torch.distributed.tensor import DTensor
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
""",
    "fork while another thread switches": """
import os, threading, torch.distributed.tensor
import cute_sharding
def switch():
    while not done:
        cute_sharding.disable(); cute_sharding.enable()
done = []
thread = threading.Thread(target=switch, daemon=True)
thread.start()
for _ in range(5):
    child = os.fork()
    if child == 0:
        cute_sharding.disable()
        os._exit(cute_sharding.is_enabled())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
done.append(1)
thread.join(60)
""",
    "warnings are errors": (
        "import warnings, torch; warnings.simplefilter('error'); import torch.distributed.tensor"
    ),
    "dataloader": """
import torch
class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        import torch.distributed.tensor
        return torch.tensor(i)
if __name__ == '__main__':
    loader = torch.utils.data.DataLoader(Numbers(), num_workers=2, batch_size=None)
    assert sorted(x.item() for x in loader) == [0, 1, 2, 3]
""",
    "spawn": """
import torch, torch.multiprocessing as mp
def child(rank):
    import torch.optim, torch.distributed.tensor
    torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1)
if __name__ == '__main__':
    mp.spawn(child, nprocs=1)
""",
    "forkserver": """
import torch, torch.multiprocessing as mp
def child():
    import torch._dynamo
if __name__ == '__main__':
    context = mp.get_context('forkserver')
    process = context.Process(target=child)
    process.start()
    process.join(120)
    assert process.exitcode == 0
""",
}
# Interpreter options that a program may be run with.
OPTIONS = {
    "importtime": (["-X", "importtime"], "import torch._dynamo"),
    "importtime, dtensor": (["-X", "importtime"], "import torch.distributed.tensor"),
    "warnings as errors": (["-W", "error::RuntimeWarning"], "import torch.distributed.tensor"),
    "optimized": (["-OO"], "import torch.optim, torch.distributed.tensor"),
    "isolated from the working folder": (
        ["-P"] if __import__("sys").version_info >= (3, 11) else [],
        "import torch._inductor",
    ),
    "developer mode": (["-X", "dev"], "import torch.distributed.tensor"),
}
