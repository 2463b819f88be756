"""The weights of one model under three programs' names: a checkpoint's (Hugging Face's names), a
trainer's, and those of an inference engine that fuses and interleaves them (as vLLM does).

    python examples/refit.py                           # the plan, without any device
    torchrun --nproc-per-node=4 examples/refit.py      # a trainer on ranks 0, 1; an engine on 2, 3

Each conversion is plain torch code on whole tensors. ``cute_sharding.plan_refit`` makes one
exchange of it, from the shards of the one to the shards of the other, and of its inverse the way
back.

The model: rotary attention with fewer heads of keys than of queries, and experts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from cute_sharding import RefitPlan, Spec, plan_refit
from cute_sharding.exchange import Mesh

Weights = dict[str, torch.Tensor]
Generator = Callable[[Weights], Weights]


class Config(NamedTuple):
    """Sizes of the model."""

    layers: int = 2
    width: int = 24
    heads: int = 4
    kv_heads: int = 2
    head: int = 6
    hidden: int = 20
    experts: int = 3
    vocabulary: int = 37


# -- conversions -----------------------------------------------------------------------------------


def pairs_together(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rotary pairs that lie half a head apart, next to one another."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def pairs_apart(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The way back."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def trainer_from_checkpoint(config: Config) -> Generator:
    """The trainer has rotary pairs together, and the experts of a layer in one tensor."""

    def generator(w: Weights) -> Weights:
        new = {
            "embedding.weight": w["model.embed_tokens.weight"],
            "norm.weight": w["model.norm.weight"],
            "output.weight": w["lm_head.weight"],
        }
        for i in range(config.layers):
            of, to = f"model.layers.{i}", f"layers.{i}"
            q, k, v, o = (w[f"{of}.self_attn.{name}_proj.weight"] for name in "qkvo")
            new[f"{to}.attention.wq"] = pairs_together(q, config.heads)
            new[f"{to}.attention.wk"] = pairs_together(k, config.kv_heads)
            new[f"{to}.attention.wv"] = v
            new[f"{to}.attention.wo"] = o
            new[f"{to}.attention_norm.weight"] = w[f"{of}.input_layernorm.weight"]
            new[f"{to}.experts_norm.weight"] = w[f"{of}.post_attention_layernorm.weight"]
            new[f"{to}.router.weight"] = w[f"{of}.mlp.gate.weight"]
            for onto, name in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
                experts = [f"{of}.mlp.experts.{e}.{name}.weight" for e in range(config.experts)]
                new[f"{to}.experts.{onto}"] = torch.stack([w[name] for name in experts])
        return new

    return generator


def engine_from_trainer(config: Config, ranks: int) -> Generator:
    """The engine has, for each of its ranks one after the other, that rank's heads of queries, keys
    and values; heads of keys are repeated where there are fewer than ranks. The same of both
    projections into an expert. Its vocabulary is a multiple of 8.
    """
    repeats = max(ranks // config.kv_heads, 1)

    def by_rank(weight: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return weight.unflatten(dim, (ranks, -1))

    def of_heads(weight: torch.Tensor) -> torch.Tensor:
        heads = weight.unflatten(0, (config.kv_heads, -1))
        return by_rank(heads.repeat_interleave(repeats, 0).flatten(0, 1))

    def padded(weight: torch.Tensor) -> torch.Tensor:
        return F.pad(weight, (0, 0, 0, -config.vocabulary % 8))

    def generator(w: Weights) -> Weights:
        new = {
            "model.embed_tokens.weight": padded(w["embedding.weight"]),
            "model.norm.weight": w["norm.weight"],
            "lm_head.weight": padded(w["output.weight"]),
        }
        for i in range(config.layers):
            of, to = f"layers.{i}", f"model.layers.{i}"
            q = by_rank(pairs_apart(w[f"{of}.attention.wq"], config.heads))
            k = of_heads(pairs_apart(w[f"{of}.attention.wk"], config.kv_heads))
            v = of_heads(w[f"{of}.attention.wv"])
            new[f"{to}.self_attn.qkv_proj.weight"] = torch.cat([q, k, v], 1).flatten(0, 1)
            new[f"{to}.self_attn.o_proj.weight"] = w[f"{of}.attention.wo"]
            new[f"{to}.input_layernorm.weight"] = w[f"{of}.attention_norm.weight"]
            new[f"{to}.post_attention_layernorm.weight"] = w[f"{of}.experts_norm.weight"]
            new[f"{to}.mlp.gate.weight"] = w[f"{of}.router.weight"]
            both = [by_rank(w[f"{of}.experts.{name}"], 1) for name in ("w1", "w3")]
            new[f"{to}.mlp.experts.w13_weight"] = torch.cat(both, 2).flatten(1, 2)
            new[f"{to}.mlp.experts.w2_weight"] = w[f"{of}.experts.w2"]
        return new

    return generator


def engine_from_checkpoint(config: Config, ranks: int) -> Generator:
    """One after the other: still one relation."""
    first, second = trainer_from_checkpoint(config), engine_from_trainer(config, ranks)
    return lambda w: second(first(w))


def in_engine(name: str, tensor: torch.Tensor) -> list[Placement]:
    """How the engine cuts its weights."""
    for part, dim in (("qkv_proj", 0), ("o_proj", 1), ("w13", 1), ("w2", 2)):
        if part in name:
            return [Shard(dim)]
    return [Shard(0)] if "embed" in name or "lm_head" in name else [Replicate()]


def checkpoint_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint."""
    c, q, kv = config, config.heads * config.head, config.kv_heads * config.head
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocabulary, c.width),
        "model.norm.weight": (c.width,),
        "lm_head.weight": (c.vocabulary, c.width),
    }
    for i in range(c.layers):
        of = f"model.layers.{i}"
        attention = {"q": (q, c.width), "k": (kv, c.width), "v": (kv, c.width), "o": (c.width, q)}
        shapes |= {f"{of}.self_attn.{name}_proj.weight": s for name, s in attention.items()}
        shapes[f"{of}.input_layernorm.weight"] = (c.width,)
        shapes[f"{of}.post_attention_layernorm.weight"] = (c.width,)
        shapes[f"{of}.mlp.gate.weight"] = (c.experts, c.width)
        for e in range(c.experts):
            for name in ("gate", "up"):
                shapes[f"{of}.mlp.experts.{e}.{name}_proj.weight"] = (c.hidden, c.width)
            shapes[f"{of}.mlp.experts.{e}.down_proj.weight"] = (c.width, c.hidden)
    return shapes


# -- the model, as the trainer has it and as a rank of the engine does -----------------------------


def rotated(x: torch.Tensor, together: bool) -> torch.Tensor:
    """Of (tokens, heads, head): pairs are turned by the position."""
    position, half = torch.arange(x.shape[0], dtype=x.dtype), x.shape[-1] // 2
    angle = position[:, None] * 0.1 ** torch.arange(half, dtype=x.dtype)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x.unflatten(-1, (half, 2)).unbind(-1) if together else x.chunk(2, -1)
    turned = [a * cos - b * sin, a * sin + b * cos]
    return torch.stack(turned, -1).flatten(-2) if together else torch.cat(turned, -1)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Of (tokens, heads, head), causal; keys and values have as many heads or fewer."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    done = F.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True
    )
    return done.transpose(0, 1).flatten(1)


def trainers_logits(config: Config, w: Weights, tokens: torch.Tensor) -> torch.Tensor:
    """The model on one device, with the trainer's weights."""
    x = w["embedding.weight"][tokens]
    for i in range(config.layers):
        of = f"layers.{i}"
        y = F.rms_norm(x, x.shape[-1:], w[f"{of}.attention_norm.weight"])
        q, k, v = (
            (y @ w[f"{of}.attention.{name}"].mT).unflatten(-1, (-1, config.head))
            for name in ("wq", "wk", "wv")
        )
        done = attention(rotated(q, together=True), rotated(k, together=True), v)
        x = x + done @ w[f"{of}.attention.wo"].mT
        y = F.rms_norm(x, x.shape[-1:], w[f"{of}.experts_norm.weight"])
        shares = (y @ w[f"{of}.router.weight"].mT).softmax(-1)
        w1, w2, w3 = (w[f"{of}.experts.{name}"] for name in ("w1", "w2", "w3"))
        inner = F.silu(torch.einsum("td,ehd->teh", y, w1)) * torch.einsum("td,ehd->teh", y, w3)
        x = x + torch.einsum("teh,edh,te->td", inner, w2, shares)
    return F.rms_norm(x, x.shape[-1:], w["norm.weight"]) @ w["output.weight"].mT


def engines_logits(
    config: Config,
    w: Weights,
    tokens: torch.Tensor,
    rank: int,
    ranks: int,
    add: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The part of the logits that a rank of the engine has, of its part of the weights. ``add``:
    the sum of what all ranks have.
    """
    rows = w["model.embed_tokens.weight"].shape[0]
    mine = (tokens // rows == rank)[:, None]
    x = add(torch.where(mine, w["model.embed_tokens.weight"][tokens % rows], 0.0))
    heads = config.heads // ranks, max(config.kv_heads // ranks, 1)
    sizes = [n * config.head for n in (heads[0], heads[1], heads[1])]
    for i in range(config.layers):
        of = f"model.layers.{i}"
        y = F.rms_norm(x, x.shape[-1:], w[f"{of}.input_layernorm.weight"])
        parts = (y @ w[f"{of}.self_attn.qkv_proj.weight"].mT).split(sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, config.head)) for part in parts)
        done = attention(rotated(q, together=False), rotated(k, together=False), v)
        x = x + add(done @ w[f"{of}.self_attn.o_proj.weight"].mT)
        y = F.rms_norm(x, x.shape[-1:], w[f"{of}.post_attention_layernorm.weight"])
        shares = (y @ w[f"{of}.mlp.gate.weight"].mT).softmax(-1)
        both = torch.einsum("td,ehd->teh", y, w[f"{of}.mlp.experts.w13_weight"])
        gate, up = both.chunk(2, -1)
        down = w[f"{of}.mlp.experts.w2_weight"]
        x = x + add(torch.einsum("teh,edh,te->td", F.silu(gate) * up, down, shares))
    return F.rms_norm(x, x.shape[-1:], w["model.norm.weight"]) @ w["lm_head.weight"].mT


# -- with devices, and without ---------------------------------------------------------------------


def plan_of_specs(config: Config, trainer: Mesh, engine: Mesh) -> RefitPlan:
    """From a trainer's shards to an engine's, of specs alone."""
    whole = trainer_from_checkpoint(config)(
        {n: torch.empty(s, device="meta") for n, s in checkpoint_shapes(config).items()}
    )
    source = {name: Spec(x.shape, trainer, [Shard(0)]) for name, x in whole.items()}
    generator = engine_from_trainer(config, len(engine.ranks))
    return plan_refit(generator, source, lambda name, x: (engine, in_engine(name, x)))


def main() -> None:
    config = Config()
    if "RANK" not in os.environ:
        print(plan_of_specs(config, Mesh((2,), (0, 1)), Mesh((2,), (2, 3))))
        return
    dist.init_process_group("gloo")
    trainer, engine = (DeviceMesh("cpu", torch.tensor(ranks)) for ranks in ([0, 1], [2, 3]))
    torch.manual_seed(0)
    checkpoint = {n: torch.randn(s) / s[-1] ** 0.5 for n, s in checkpoint_shapes(config).items()}
    whole = trainer_from_checkpoint(config)(checkpoint)
    state = {name: distribute_tensor(x, trainer, [Shard(0)]) for name, x in whole.items()}
    plan = plan_refit(
        engine_from_trainer(config, engine.size()),
        state,
        lambda name, x: (engine, in_engine(name, x)),
    )
    weights = plan.run(state)

    def add(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=engine.get_group())
        return x

    tokens = torch.randint(config.vocabulary, (9,), generator=torch.Generator().manual_seed(1))
    if dist.get_rank() in (2, 3):
        local = {name: x.to_local() for name, x in weights.items()}
        logits = engines_logits(config, local, tokens, engine.get_local_rank(), 2, add)
        rows = DTensor.from_local(logits, engine, [Shard(1)]).full_tensor()[:, : config.vocabulary]
        assert torch.allclose(rows, trainers_logits(config, whole, tokens), atol=1e-5)
    back = plan.inverse().run(weights)
    if dist.get_rank() in (0, 1):
        assert all(torch.equal(back[name].to_local(), x.to_local()) for name, x in state.items())
    if dist.get_rank() == 2:
        print(f"{plan}\nthe engine's logits are the trainer's, and back there are its weights")
    dist.barrier()  # gloo's threads let go of the last exchange before the group ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
