"""What a program waits for with the package: the import of DTensor, the first training step, and a
step when all is warm, without a flag and with ``USE_CUTE_SHARDING=1``.

    python -m benchmarks.first_step [--repeat 7]

The step is a layer of attention with tensor parallelism and a next-token loss, forward and
backward, on one process that poses as rank 0 of four: time of the processor alone. Processes with
and without the flag run in turn, and the least of each is printed. Modules are imported from their
bytecode, as pip leaves it where a package is installed. What the import takes longer with the flag
is printed in two parts: the modules of this package, and what it replaces in PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile

from cute_sharding.tools.progress import progress

STEP = """
import json, time
import torch
start = time.process_time()
import torch.distributed.tensor
imported = time.process_time() - start

import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

torch.set_num_threads(1)
dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
mesh = init_device_mesh("cpu", (4,))
def on_mesh(tensor, placement):
    return distribute_tensor(tensor, mesh, [placement])
tokens = on_mesh(torch.zeros(2, 16, dtype=torch.long), Replicate())
words = on_mesh(torch.zeros(49, 32), Replicate())
head, wq, wk, wv, wo = (on_mesh(torch.zeros(n, 32), Shard(0)) for n in (52, 32, 32, 32, 32))
for weight in (words, head, wq, wk, wv, wo):
    weight.requires_grad_()

def step():
    start = time.process_time()
    x = F.embedding(tokens, words)
    parts = (x @ torch.cat([wq, wk, wv]).T).chunk(3, -1)
    q, k, v = (part.unflatten(-1, (8, 4)).transpose(1, 2) for part in parts)
    attended = ((q @ k.transpose(-1, -2)).tril().softmax(-1) @ v).transpose(1, 2).flatten(2)
    x = x + (attended @ wo).redistribute(placements=[Replicate()])
    logits = (x @ head.T)[..., :49]
    F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return time.process_time() - start

steps = [step() for _ in range(30)]
print(json.dumps([imported, steps[0], min(steps[10:])]))
"""
PARTS = """
import json, time
import torch.distributed.tensor
start = time.process_time()
import cute_sharding.dtensor.switch.adapter
imported = time.process_time() - start
cute_sharding.enable(redistribution=True, movement=True)
print(json.dumps([imported, time.process_time() - start - imported]))
"""


def run(program: str, flag: str, bytecode: str) -> list[float]:
    """The seconds that a program prints, in a process of its own."""
    environment = {**os.environ, "USE_CUTE_SHARDING": flag, "PYTHONPYCACHEPREFIX": bytecode}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    found: list[float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=7)
    repeat = parser.parse_args().repeat
    what = f"{3 * repeat + 1} processes import and run one layer"
    with progress(what), tempfile.TemporaryDirectory() as bytecode:
        run(STEP, "1", bytecode)  # which writes it
        pairs = [(run(STEP, "0", bytecode), run(STEP, "1", bytecode)) for _ in range(repeat)]
        parts = [run(PARTS, "0", bytecode) for _ in range(repeat)]
    print(f"{'milliseconds':28}{'PyTorch':>10}{'with the flag':>16}")
    for number, name in enumerate(("import of DTensor", "first step", "warm step")):
        least = [1000 * min(pair[way][number] for pair in pairs) for way in (0, 1)]
        print(f"{name:28}{least[0]:10.1f}{least[1]:16.1f}")
    for number, name in enumerate(("of it modules", "of it replacing")):
        print(f"{name:28}{1000 * min(each[number] for each in parts):26.1f}")


if __name__ == "__main__":
    main()
