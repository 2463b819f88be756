"""What the processes of tests are forked from has imported: it takes longer than most jobs. Little
else has been done there.
"""

import gc
from importlib import import_module

for name in (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
    "sympy.tensor.tensor",
    "torch.testing._internal.distributed.fake_pg",
    "cute_sharding.dtensor",
    "cluster_worker",
    "movement_worker",
    "state_worker",
):
    import_module(name)

import_module("unmeasured").time_no_guards()

# What the first switching on in a process computes.
cute_sharding = import_module("cute_sharding")
cute_sharding.enable(redistribution=True, movement=True)
cute_sharding.disable()

# What is here stays: no collection in a fork looks through it, and so copies it.
gc.freeze()
gc.set_threshold(100_000, 20, 100)  # as in conftest.py
