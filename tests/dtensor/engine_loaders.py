"""Loaders as inference engines have them: each rank copies its own part of whole tensors into the
parameters that it has. Written as a stranger would, in the style of vLLM's; test_loaders.py runs
them on whole tensors and through plans.

A kind is a function ``(rank, ranks, make) -> into, load`` with the tensors of its checkpoint;
``make(shape, dtype)`` makes a parameter.
"""

from math import prod
from types import SimpleNamespace

import torch
from torch import nn

F32, BF16, FP8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
WIDTH, HEAD, VOCABULARY, HIDDEN = 12, 4, 37, 10
KINDS = {}


def kind(**checkpoint):
    """Registers a kind, with shapes, or pairs of a shape and a dtype, of its checkpoint; two
    underscores stand for a dot.
    """

    def register(function):
        sized = {
            name.replace("__", "."): (shape, F32) if isinstance(shape[0], int) else shape
            for name, shape in checkpoint.items()
        }
        KINDS[function.__name__] = (sized, function)
        return function

    return register


def values(sized, seed=0):
    """Whole tensors of a checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, (shape, dtype) in sized.items()
    }


def default_loader(param, loaded):
    assert param.shape == loaded.shape, (param.shape, loaded.shape)
    param.data.copy_(loaded)


def by_name(params, mapping=()):
    """What a model does: names of a checkpoint become a parameter and a shard of it."""

    def load(weights):
        for name, loaded in weights.items():
            for of, into, shard in mapping:
                if of in name:
                    param = params[name.replace(of, into)]
                    param.weight_loader(param, loaded, shard)
                    break
            else:
                param = params[name]
                getattr(param, "weight_loader", default_loader)(param, loaded)

    return load


def with_loader(param, loader, **attributes):
    param.weight_loader = loader
    for name, value in attributes.items():
        setattr(param, name, value)
    return param


QKV = [("q_proj", "qkv_proj", "q"), ("k_proj", "qkv_proj", "k"), ("v_proj", "qkv_proj", "v")]


def qkv_loader(rank, heads, kv_heads, replicas=1):
    """Offsets by shard, as a fused projection has them: ``heads`` of this rank."""
    places = {
        "q": (0, heads * HEAD, rank),
        "k": (heads * HEAD, kv_heads * HEAD, rank // replicas),
        "v": ((heads + kv_heads) * HEAD, kv_heads * HEAD, rank // replicas),
    }

    def loader(param, loaded, shard):
        offset, size, at = places[shard]
        dim = param.output_dim
        data = param.data.narrow(dim, offset, size)
        loaded = loaded.narrow(dim, at * size, size)
        assert data.shape == loaded.shape
        data.copy_(loaded)

    return loader


ATTENTION = {
    "a__q_proj__weight": (8 * HEAD, WIDTH),
    "a__k_proj__weight": (4 * HEAD, WIDTH),
    "a__v_proj__weight": (4 * HEAD, WIDTH),
    "a__q_proj__bias": (8 * HEAD,),
    "a__k_proj__bias": (4 * HEAD,),
    "a__v_proj__bias": (4 * HEAD,),
}


@kind(**ATTENTION)
def grouped_heads(rank, ranks, make):
    heads, kv = 8 // ranks, 4 // ranks
    loader = qkv_loader(rank, heads, kv)
    rows = (heads + 2 * kv) * HEAD
    params = {
        "a.qkv_proj.weight": with_loader(make((rows, WIDTH), BF16), loader, output_dim=0),
        "a.qkv_proj.bias": with_loader(make((rows,), BF16), loader, output_dim=0),
    }
    return params, by_name(params, QKV)


@kind(
    a__q_proj__weight=(4 * HEAD, WIDTH),
    a__k_proj__weight=(HEAD, WIDTH),
    a__v_proj__weight=(HEAD, WIDTH),
)
def replicated_heads(rank, ranks, make):
    loader = qkv_loader(rank, 4 // ranks, 1, replicas=ranks)
    rows = (4 // ranks + 2) * HEAD
    params = {"a.qkv_proj.weight": with_loader(make((rows, WIDTH)), loader, output_dim=0)}
    return params, by_name(params, QKV)


@kind(a__q_proj__weight=(5 * HEAD, WIDTH), a__o_proj__weight=(WIDTH, 5 * HEAD))
def padded_heads(rank, ranks, make):
    """Heads that do not divide: the last rank has some of zeros."""
    mine = -(-5 // ranks)
    first, stop = min(rank * mine, 5), min((rank + 1) * mine, 5)
    q, o = make((mine, HEAD, WIDTH)), make((WIDTH, mine * HEAD))

    def load(weights):
        q.data.zero_()
        q.data[: stop - first].copy_(weights["a.q_proj.weight"].view(5, HEAD, WIDTH)[first:stop])
        o.data.fill_(0)
        n = (stop - first) * HEAD
        o.data[:, :n] = weights["a.o_proj.weight"][:, first * HEAD : stop * HEAD]

    return {"q": q, "o": o}, load


@kind(
    mlp__gate_proj__weight=(2 * HIDDEN, WIDTH),
    mlp__up_proj__weight=(2 * HIDDEN, WIDTH),
    mlp__down_proj__weight=(WIDTH, 2 * HIDDEN),
    mlp__down_proj__bias=(WIDTH,),
)
def gate_and_up_and_down(rank, ranks, make):
    size = 2 * HIDDEN // ranks

    def merged(param, loaded, shard):
        start = rank * size
        param.data[shard * size : (shard + 1) * size].copy_(loaded[start : start + size])

    def row_parallel(param, loaded):
        dim = param.input_dim
        n = param.data.shape[dim]
        default_loader(param, loaded.narrow(dim, rank * n, n))

    params = {
        "mlp.gate_up_proj.weight": with_loader(make((2 * size, WIDTH), BF16), merged),
        "mlp.down_proj.weight": with_loader(make((WIDTH, size), BF16), row_parallel, input_dim=1),
        "mlp.down_proj.bias": make((WIDTH,), BF16),
    }
    return params, by_name(
        params, [("gate_proj", "gate_up_proj", 0), ("up_proj", "gate_up_proj", 1)]
    )


@kind(embed__weight=(VOCABULARY, WIDTH), norm__weight=(WIDTH,))
def padded_vocabulary_tied(rank, ranks, make):
    """The head is the embedding: one tensor of two names."""
    rows = -(-VOCABULARY // (8 * ranks)) * 8
    start, stop = (min((rank + k) * rows, VOCABULARY) for k in (0, 1))

    def loader(param, loaded):
        assert loaded.shape[param.output_dim] == VOCABULARY
        loaded = loaded.narrow(param.output_dim, start, stop - start)
        param[: loaded.shape[0]].data.copy_(loaded)
        param[loaded.shape[0] :].data.fill_(0)

    embed = with_loader(make((rows, WIDTH)), loader, output_dim=0)
    params = {"embed.weight": embed, "lm_head.weight": embed, "norm.weight": make((WIDTH,))}

    def load(weights):
        by_name(params)(dict(weights))
        params["lm_head.weight"].data.copy_(params["embed.weight"])

    return params, load


EXPERTS = 4


@kind(
    **{
        f"experts__{e}__{name}__weight": shape
        for e in range(EXPERTS)
        for name, shape in (("w1", (8, WIDTH)), ("w2", (WIDTH, 8)), ("w3", (8, WIDTH)))
    },
    gate__weight=(EXPERTS, WIDTH),
)
def experts_by_loops(rank, ranks, make):
    """All experts on every rank, each cut; by (parameter, name, expert, shard)."""
    size = 8 // ranks
    params = {
        "w13": make((EXPERTS, 2 * size, WIDTH), BF16),
        "w2": make((EXPERTS, WIDTH, size), BF16),
        "gate": make((EXPERTS, WIDTH)),
    }
    mapping = [
        ("w13" if shard != "w2" else "w2", f"experts.{e}.{shard}.weight", e, shard)
        for e in range(EXPERTS)
        for shard in ("w1", "w2", "w3")
    ]

    def expert_loader(param, loaded, shard, expert):
        data = param.data[expert]
        if shard == "w2":
            data.copy_(loaded.narrow(1, rank * size, size))
        else:
            half = data.narrow(0, size if shard == "w3" else 0, size)
            half.copy_(loaded.narrow(0, rank * size, size))

    def load(weights):
        for name, loaded in weights.items():
            for into, of, expert, shard in mapping:
                if of == name:
                    expert_loader(params[into], loaded, shard, expert)
        default_loader(params["gate"], weights["gate.weight"])

    return params, load


@kind(
    experts__gate_up_proj=(EXPERTS, WIDTH, 16),
    experts__down_proj=(EXPERTS, 8, WIDTH),
    experts__gate_up_bias=(EXPERTS, 16),
)
def experts_transposed(rank, ranks, make):
    """Experts of this rank alone, from tensors of all that lie the other way round."""
    mine = EXPERTS // ranks
    w13, w2, b13 = make((mine, 16, WIDTH), BF16), make((mine, WIDTH, 8), BF16), make((mine, 16))

    def load(weights):
        for k in range(mine):
            expert = rank * mine + k
            w13.data[k].copy_(weights["experts.gate_up_proj"][expert].t())
            w2.data[k] = weights["experts.down_proj"].transpose(-1, -2)[expert]
        b13.data.copy_(weights["experts.gate_up_bias"].chunk(ranks)[rank])

    return {"w13": w13, "w2": w2, "b13": b13}, load


@kind(
    experts__gate_up_proj=(EXPERTS, 16, WIDTH),
    experts__down_proj=(EXPERTS, WIDTH, 8),
)
def experts_interleaved(rank, ranks, make):
    """Rows of gate and up alternate in the checkpoint, and are apart and padded in the engine."""
    size, padded = 8 // ranks, 8 // ranks + 2
    w13, w2 = make((EXPERTS, 2, padded, WIDTH), BF16), make((EXPERTS, WIDTH, padded), BF16)

    def load(weights):
        both = weights["experts.gate_up_proj"].narrow(1, 2 * rank * size, 2 * size)
        w13.data[:, :, size:] = 0
        w13.data[:, 0, :size].copy_(both[:, ::2])
        w13.data[:, 1, :size].copy_(both[:, 1::2])
        w2.zero_()
        w2.data[..., :size].copy_(weights["experts.down_proj"][..., rank * size :][..., :size])

    return {"w13": w13, "w2": w2}, load


RANK, NOPE, ROPE = 6, 4, 2  # of latent attention


@kind(
    a__q_a_proj__weight=(8, WIDTH),
    a__kv_a_proj_with_mqa__weight=(RANK + ROPE, WIDTH),
    a__kv_b_proj__weight=(4 * 2 * NOPE, RANK),
    a__q_b_proj__weight=(4 * (NOPE + ROPE), 8),
)
def latent_attention(rank, ranks, make):
    """Two projections in one, replicated; and what comes back from the latent, by heads, turned
    into the two matrices that are absorbed.
    """
    heads = 4 // ranks
    qkv_a, q_b = make((8 + RANK + ROPE, WIDTH)), make((heads * (NOPE + ROPE), 8), BF16)
    w_uk, w_uv = make((heads, NOPE, RANK)), make((heads, RANK, NOPE))

    def load(weights):
        qkv_a.data[:8] = weights["a.q_a_proj.weight"]
        qkv_a.data[8:].copy_(weights["a.kv_a_proj_with_mqa.weight"])
        rows = heads * (NOPE + ROPE)
        q_b.copy_(weights["a.q_b_proj.weight"][rank * rows : (rank + 1) * rows].to(q_b.dtype))
        kv_b = weights["a.kv_b_proj.weight"].unflatten(0, (4, 2 * NOPE))
        kv_b = kv_b[rank * heads : (rank + 1) * heads]
        k, v = kv_b.split([NOPE, NOPE], dim=1)
        w_uk.data.copy_(k)
        w_uv.data.copy_(v.transpose(1, 2).contiguous())

    return {"qkv_a": qkv_a, "q_b": q_b, "w_uk": w_uk, "w_uv": w_uv}, load


KEY_HEADS, PER_KEY, KEY, VALUE = 2, 2, 4, 3  # of a gated delta net


@kind(
    g__in_proj_qkvz__weight=(KEY_HEADS * (2 * KEY + 2 * PER_KEY * VALUE), WIDTH),
    g__in_proj_ba__weight=(KEY_HEADS * 2 * PER_KEY, WIDTH),
    g__conv1d__weight=(KEY_HEADS * (2 * KEY + PER_KEY * VALUE), 1, 3),
    g__A_log=(KEY_HEADS * PER_KEY,),
    g__dt_bias=(KEY_HEADS * PER_KEY,),
)
def gated_delta_net(rank, ranks, make):
    """Queries, keys, values and gates of a head together in the checkpoint, each together in the
    engine; a convolution over three parts, each cut by itself.
    """
    heads = KEY_HEADS // ranks
    sizes = (KEY, KEY, PER_KEY * VALUE, PER_KEY * VALUE)
    qkvz, ba = make((heads * sum(sizes), WIDTH)), make((heads * 2 * PER_KEY, WIDTH))
    conv = make((heads * sum(sizes[:3]), 1, 3))
    a_log, dt_bias = make((heads * PER_KEY,)), make((heads * PER_KEY,), BF16)

    def load(weights):
        whole = weights["g.in_proj_qkvz.weight"].view(KEY_HEADS, sum(sizes), WIDTH)
        mine = whole[rank * heads : (rank + 1) * heads]
        parts = [part.reshape(-1, WIDTH) for part in mine.split(sizes, 1)]
        qkvz.data.copy_(torch.cat(parts))
        groups = weights["g.in_proj_ba.weight"].unflatten(0, (KEY_HEADS, 2, PER_KEY))
        mine = groups[rank * heads : (rank + 1) * heads]
        ba.data.copy_(mine.permute(1, 0, 2, 3).flatten(0, 2))
        at = 0
        for size, part in zip(
            sizes, weights["g.conv1d.weight"].split([n * KEY_HEADS for n in sizes[:3]])
        ):
            n = size * heads
            conv.data.narrow(0, at, n).copy_(part.narrow(0, rank * n, n))
            at += n
        for name, param in (("A_log", a_log), ("dt_bias", dt_bias)):
            param.data.copy_(weights[f"g.{name}"].chunk(ranks)[rank])

    return {"qkvz": qkvz, "ba": ba, "conv": conv, "A_log": a_log, "dt_bias": dt_bias}, load


@kind(
    a__query_key_value__weight=(4 * 3 * HEAD, WIDTH),
    a__query_key_value__bias=(4 * 3 * HEAD,),
    a__rotary__weight=(4 * HEAD, WIDTH),
)
def blocks_of_heads(rank, ranks, make):
    """The three parts of a head one after the other in the checkpoint (as GPT-NeoX has them), and
    rotary pairs that lie next to one another instead of half a head apart.
    """
    heads = 4 // ranks
    weight, bias = make((3 * heads * HEAD, WIDTH)), make((3 * heads * HEAD,))
    rotary = make((heads * HEAD, WIDTH))

    def load(weights):
        for name, param in (("weight", weight), ("bias", bias)):
            loaded = weights[f"a.query_key_value.{name}"]
            loaded = loaded.view(4, 3, HEAD, *loaded.shape[1:])
            loaded = loaded.transpose(0, 1)[:, rank * heads : (rank + 1) * heads]
            param.data.copy_(loaded.reshape(param.shape))
        pairs = weights["a.rotary.weight"].view(4, 2, HEAD // 2, WIDTH).transpose(1, 2)
        rotary.data.copy_(pairs.reshape(4 * HEAD, WIDTH).chunk(ranks)[rank])

    return {"weight": weight, "bias": bias, "rotary": rotary}, load


@kind(
    m__gate_proj__weight=((16, WIDTH), FP8),
    m__up_proj__weight=((16, WIDTH), FP8),
    m__gate_proj__weight_scale_inv=(4, 3),
    m__up_proj__weight_scale_inv=(4, 3),
    m__gate_proj__input_scale=(1,),
    m__up_proj__input_scale=(1,),
)
def fp8_with_scales(rank, ranks, make):
    """Blocks of 4 x 4 have a scale; each of two projections has one more."""
    size, block = 16 // ranks, 4
    params = {
        "m.gate_up_proj.weight": make((2 * size, WIDTH), FP8),
        "m.gate_up_proj.weight_scale_inv": make((2 * size // block, WIDTH // block)),
        "m.gate_up_proj.input_scale": make((2,)),
    }

    def load(weights):
        for name, loaded in weights.items():
            shard = 0 if "gate_proj" in name else 1
            param = params[name.replace("gate_proj", "gate_up_proj").replace("m.up_", "m.gate_up_")]
            if name.endswith("input_scale"):
                param.data[shard].copy_(loaded.reshape(()))
                continue
            n = size // block if "scale" in name else size
            param.data.narrow(0, shard * n, n).copy_(loaded.narrow(0, rank * n, n))

    return params, load


@kind(embed__weight=(VOCABULARY, WIDTH), lm_head__weight=(VOCABULARY, WIDTH), scale=(1,))
def by_state_dict(rank, ranks, make):
    """A module of plain PyTorch, of which every rank has all."""
    model = nn.Module()
    model.embed = nn.Embedding(VOCABULARY, WIDTH, _weight=make((VOCABULARY, WIDTH)), _freeze=True)
    model.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False, device="meta", dtype=F32)
    model.lm_head.weight = model.embed.weight
    model.register_buffer("scale", make((1,)))

    def load(weights):
        with torch.no_grad():
            model.load_state_dict({**weights, "lm_head.weight": weights["embed.weight"]})

    return dict(model.state_dict(keep_vars=True)), load


def parameter(fill):
    """A ``make`` of parameters that are full of a number."""

    def make(shape, dtype=F32):
        x = torch.full(shape, fill, dtype=F32).to(dtype)
        return nn.Parameter(x, requires_grad=False)

    return make


def numbered(fill=0):
    """A ``make`` for numbers of elements in place of values."""
    return lambda shape, dtype=F32: nn.Parameter(
        torch.full(shape, fill, dtype=torch.int64), requires_grad=False
    )


def numbers(sized):
    """Whole tensors in which each element of all is another number, from 1."""
    found, at = {}, 1
    for name, (shape, _) in sized.items():
        found[name] = torch.arange(at, at + prod(shape)).reshape(shape)
        at += prod(shape)
    return found


def engine(name, rank, ranks, make):
    """Of a kind, what a rank of the engine has."""
    into, load = KINDS[name][1](rank, ranks, make)
    return SimpleNamespace(into=into, load=load)
