"""What test_models.py runs: torch's own test transformer, trained by DTensor programs as anyone
would write them. What views and redistributions do is up to the environment.

    python models_program.py FOLDER NAME...

trains in four processes, program after program. They leave in FOLDER what the test compares:
rank0.pt and so on, or error0.txt and so on.
"""

import faulthandler
import sys
import time
import traceback
from collections import Counter
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer
from torch.utils._python_dispatch import TorchDispatchMode

WORLD = 4
STEPS = 2
PATIENCE = timedelta(seconds=90)


class Program:
    """One way to train the transformer: the mesh, what is parallel, and sizes.

    sequence: also over the sequence, between the layers. dtensors: and what goes from layer to
    layer are DTensors, not local tensors. loss: also the loss, over the vocabulary. shards:
    parameters are sharded over the first mesh dim, by FSDP. saves: checkpoints are saved and
    loaded.
    """

    def __init__(
        self,
        mesh=(WORLD,),
        *,
        sequence=False,
        dtensors=False,
        loss=False,
        shards=False,
        saves=False,
        foreach=False,
        length=8,
        **sizes,
    ):
        (
            self.mesh,
            self.sequence,
            self.dtensors,
            self.loss,
            self.shards,
            self.saves,
            self.foreach,
            self.length,
        ) = mesh, sequence, dtensors, loss, shards, saves, foreach, length
        self.arguments = {
            "n_layers": 1,
            "vocab_size": 16,
            "max_seq_len": length,
            "dim": 16,
            "n_heads": 4,
            "dropout_p": 0.0,
            "weight_tying": False,
        } | sizes

    @property
    def even(self):
        return self.arguments["vocab_size"] % WORLD == self.length % WORLD == 0

    def model(self, seed=0):
        """As on one device."""
        torch.manual_seed(seed)
        return Transformer(ModelArgs(**self.arguments))

    def data(self, step, batch=4):
        """The tokens of a step, and those that come after them."""
        tokens = torch.randint(
            self.arguments["vocab_size"],
            (batch, self.length + 1),
            generator=torch.Generator().manual_seed(100 + step),
        )
        return tokens[:, :-1], tokens[:, 1:]

    def parallel(self, seed=0):
        """The model over the mesh, and the mesh dim over which batches are dealt, if there
        is one.
        """
        mesh = init_device_mesh("cpu", self.mesh, mesh_dim_names=("dp", "tp")[-len(self.mesh) :])
        model = self.model(seed)
        if self.dtensors:
            parallelize_with_dtensors(model, mesh["tp"])
        else:
            output = model.output
            if self.loss:
                model.output = torch.nn.Linear(1, 1)  # torch's helper would gather its output
            Transformer.parallelize(model, mesh["tp"], self.sequence)
            if self.loss:
                model.output = parallelize_module(
                    output,
                    mesh["tp"],
                    ColwiseParallel(
                        input_layouts=Shard(1) if self.sequence else None,
                        output_layouts=Shard(-1),
                        use_local_output=False,
                    ),
                )
        if self.shards:
            for layer in model.layers:
                fully_shard(layer, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
        return model, mesh["dp"] if self.shards else None


def parallelize_with_dtensors(model, mesh):
    """Tensor and sequence parallel, where activations stay DTensors: so they know their sizes, and
    the length of a sequence need not divide.
    """
    shared = {"use_local_output": False}
    plan = {
        "tok_embeddings": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1), **shared
        ),
        "pos_embeddings": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(0), **shared
        ),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), **shared),
    }
    for i in range(len(model.layers)):
        plan |= {
            f"layers.{i}.{name}": SequenceParallel() for name in ("attention_norm", "ffn_norm")
        }
        plan |= {
            f"layers.{i}.attention": PrepareModuleInput(
                input_layouts=Shard(1), desired_input_layouts=Replicate()
            )
        }
        plan |= {
            f"layers.{i}.attention.{name}": ColwiseParallel(**shared) for name in ("wq", "wk", "wv")
        }
        plan |= {f"layers.{i}.feed_forward.w1": ColwiseParallel(input_layouts=Shard(1), **shared)}
        plan |= {
            f"layers.{i}.{name}": RowwiseParallel(output_layouts=Shard(1), **shared)
            for name in ("attention.wo", "feed_forward.w2")
        }
    parallelize_module(model, mesh, plan)


# What is not here, since torch by itself does not run it or runs it wrongly (2.13 to 2.15):
# - Sequence parallel by torch's helper with a length that does not divide: it hands on local
#   tensors, and takes them for equal shards again (gloo then aborts). With DTensors handed on it is
#   right.
# - A rank without a row of an embedding, as of 9 positions over 4: index_select() raises there.
# - Heads that do not divide: DTensor refuses the view of the queries.
# - fully_shard over tensor parallelism with a vocabulary that does not divide: set_model_state_dict
#   of a full state dict raises AssertionError, in the scatter of what it had to pad.
PROGRAMS = {
    "tp": Program(weight_tying=True, checkpoint_activations=True, n_layers=2, foreach=True),
    "tp, uneven": Program(vocab_size=13, length=10, saves=True),
    "sp": Program(sequence=True, vocab_size=13, checkpoint_activations=True),
    "sp, uneven": Program(sequence=True, dtensors=True, loss=True, vocab_size=13, length=10),
    "sp, dropout": Program(sequence=True, dropout_p=0.1),
    "loss, uneven": Program(loss=True, vocab_size=13, length=10),
    "fsdp, tp": Program((2, 2), shards=True, saves=True, foreach=True),
    "fsdp of tp, uneven": Program((2, 2), shards=True, vocab_size=13, length=9, saves=True),
    "fsdp, sp, loss": Program(
        (2, 2),
        shards=True,
        sequence=True,
        loss=True,
        vocab_size=13,
        length=10,
        checkpoint_activations=True,
    ),
}


def full(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def parameters_of(model):
    return {name: full(parameter) for name, parameter in model.named_parameters()}


def state_of(optimizer, model):
    return {
        f"{name} {key}": full(value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


class Collectives(TorchDispatchMode):
    """Counts what is sent, by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            # DTensor goes first: what it does with its local tensors comes by here
            return NotImplemented
        space, _, name = function._schema.name.partition("::")
        if space in ("_c10d_functional", "c10d") and name not in (
            "wait_tensor",
            "_wrap_tensor_autograd",
        ):
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


def clip(parameters, most=1.0):
    """The norm of all gradients, which are then scaled to ``most``. torch's clip_grad_norm_ wants
    tensors of one mesh.
    """
    groups = {}
    for parameter in parameters:
        groups.setdefault(
            parameter.device_mesh if isinstance(parameter, DTensor) else None, []
        ).append(parameter)
    if len(groups) == 1:
        return full(torch.nn.utils.clip_grad_norm_(parameters, most))
    norms = [
        full(torch.nn.utils.get_total_norm([p.grad for p in group])) for group in groups.values()
    ]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for group in groups.values():
        torch.nn.utils.clip_grads_with_norm_(group, most, total)
    return total


def optimizer_of(program, model):
    # An epsilon that rounding errors stay small beside: a gradient of nothing but rounding errors
    # would move its parameter by the whole learning rate.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=program.foreach)


def train(program, model, optimizer, dp=None, steps=range(STEPS)):
    """Loss, norm of the gradients and collectives, step by step."""
    losses, norms, collectives = [], [], []
    for step in steps:
        tokens, labels = program.data(step)
        if dp is not None:
            tokens, labels = (
                whole.chunk(dp.size())[dp.get_local_rank()] for whole in (tokens, labels)
            )
        with (
            Collectives() as counting,
            implicit_replication(),
            sdpa_kernel(SDPBackend.MATH),
        ):  # DTensor has no rule for the attention kernel that torch prefers on CPU
            with loss_parallel() if program.loss and dist.is_initialized() else nullcontext():
                loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
                loss.backward()
            norms.append(clip(list(model.parameters())))
            optimizer.step()
            optimizer.zero_grad()
        loss = full(loss)
        if dp is not None:
            dist.all_reduce(loss, group=dp.get_group())
            loss /= dp.size()
        losses.append(loss)
        collectives.append(dict(counting.counts))
    return {"losses": torch.stack(losses), "norms": torch.stack(norms), "collectives": collectives}


def alone(name):
    """The program on one device."""
    program = PROGRAMS[name]
    model = program.model()
    return train(program, model, optimizer_of(program, model)) | {
        "parameters": parameters_of(model)
    }


def together(name, folder):
    """The program over the mesh, on this rank."""
    program = PROGRAMS[name]
    model, dp = program.parallel()
    optimizer = optimizer_of(program, model)
    result = train(program, model, optimizer, dp)
    result["parameters"] = parameters_of(model)
    if program.saves:
        result["state"] = state_of(optimizer, model)
        result["restored"] = save_and_load(program, model, optimizer, dp, folder / name)
    return result


def save_and_load(program, model, optimizer, dp, folder):
    """What comes back of the parameters and of the optimizer's state, and how training goes on from
    there.
    """
    sharded = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.save(sharded, checkpoint_id=folder)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    whole = {
        name: value.clone() for name, value in whole.items()
    }  # what is not sharded comes as it is, and will change
    onward = train(program, model, optimizer, dp, [STEPS])
    result = {"whole": whole, "onward": onward, "changed": parameters_of(model)}

    sharded = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.load(sharded, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=sharded["model"], optim_state_dict=sharded["optimizer"]
    )
    result |= {"loaded": parameters_of(model), "loaded state": state_of(optimizer, model)}
    result |= {
        "onward again": train(program, model, optimizer, dp, [STEPS]),
        "changed again": parameters_of(model),
    }

    if not program.shards or program.even:
        other, _ = program.parallel(seed=1)
        result["other"] = parameters_of(other)
        set_model_state_dict(other, dict(whole), options=StateDictOptions(full_state_dict=True))
        result["loaded whole"] = parameters_of(other)
    return result


def start(rank, folder, names):
    faulthandler.enable()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=WORLD,
        timeout=PATIENCE,
    )
    results, name = {}, "none"
    try:
        for name in names:
            results[name] = together(name, folder)
        results["modules"] = sorted(sys.modules)
        torch.save(results, folder / f"rank{rank}.pt")
        dist.barrier()  # whoever is done first waits for the others: its threads serve them still
    except BaseException:
        (folder / f"error{rank}.txt").write_text(
            f"{time.time()}\nprogram {name!r}, rank {rank}:\n{traceback.format_exc()}"
        )
        raise
    finally:
        dist.destroy_process_group()
        time.sleep(0.5)  # gloo aborts where a process ends before its threads do


if __name__ == "__main__":
    multiprocessing.start_processes(
        start, args=(Path(sys.argv[1]), sys.argv[2:]), nprocs=WORLD, start_method="fork"
    )
