"""Training steps, without their programs: the operands of each, their shardings, and their numbers.
The programs are in :mod:`benchmarks.steps_of_torch` and :mod:`benchmarks.steps_of_jax`, with the
same names. Neither torch nor JAX is imported here.
"""

from __future__ import annotations

import zlib
from math import prod
from typing import Any, NamedTuple

# The names of mesh dims, the last first: a mesh of one dim has tp alone.
DIMS = ("dp", "tp")


class Operand(NamedTuple):
    """A weight or an input. ``over``: for each dim, the mesh dims that shard it; ``below``: the
    bound of integers, or None for numbers.
    """

    shape: tuple[int, ...]
    over: tuple[tuple[str, ...], ...]
    below: int | None


def operand(text: str) -> Operand:
    """An operand from its sizes: ``@dp`` after a size shards the dim over that mesh dim, and ``<n``
    stands for integers below n.

    >>> operand("8@dp 64<512")
    Operand(shape=(8, 64), over=(('dp',), ()), below=512)
    """
    dims, _, below = text.partition("<")
    parts = [dim.split("@") for dim in dims.split()]
    shape, over = tuple(int(n) for n, *_ in parts), tuple(tuple(names) for _, *names in parts)
    return Operand(shape, over, int(below) if below else None)


class Step(NamedTuple):
    """A training step: forward, backward, and SGD on the weights.

    Attributes:
        name: that of the functions which compute its loss.
        about: what it is.
        inputs, weights: operands by name, written as their sizes.
    """

    name: str
    about: str
    inputs: dict[str, str]
    weights: dict[str, str]

    @property
    def operands(self) -> dict[str, Operand]:
        return {name: operand(text) for name, text in (self.inputs | self.weights).items()}


RATE = 0.1  # of SGD


def names_of(mesh: tuple[int, ...]) -> tuple[str, ...]:
    """The names of the dims of a mesh."""
    return DIMS[-len(mesh) :]


def numbers(step: Step) -> dict[str, Any]:
    """The operands of a step as numpy arrays, the same in each process: matrices keep the size of
    what they multiply, and vectors of weights are about 1.
    """
    import numpy as np

    found = {}
    for name, (shape, _, below) in step.operands.items():
        drawn = np.random.default_rng(zlib.crc32(f"{step.name} {name}".encode()))
        if below is not None:
            found[name] = drawn.integers(0, below, shape)
            continue
        x = drawn.standard_normal(shape)
        if name in step.weights:
            x = 1 + x / 10 if len(shape) == 1 else x * (shape[0] / prod(shape)) ** 0.5
        found[name] = x.astype("float32")
    return found


# A transformer block whose heads and hidden units are sharded.
BLOCK = {
    "scale1": "256",
    "shift1": "256",
    "wq": "256@tp 256",
    "wk": "256@tp 256",
    "wv": "256@tp 256",
    "wo": "256 256@tp",
    "scale2": "256",
    "shift2": "256",
    "up": "1024@tp 256",
    "down": "256 1024@tp",
}

STEPS = (
    Step(
        "diffusion_block",
        "block of a diffusion transformer, modulation by chunk(6)",
        {"x": "8@dp 64 256", "c": "8@dp 256", "target": "8@dp 64 256"},
        {
            "modulation": "1536@tp 256",
            "bias": "1536@tp",
            "wq": "256@tp 256",
            "wk": "256@tp 256",
            "wv": "256@tp 256",
            "wo": "256 256@tp",
            "up": "1024@tp 256",
            "down": "256 1024@tp",
        },
    ),
    Step(
        "language_model",
        "language model: sharded embedding, one block, sharded head, loss",
        {"tokens": "4@dp 64<2048", "labels": "4@dp 64<2048"},
        {
            "embedding": "2048@tp 256",
            **BLOCK,
            "scale3": "256",
            "shift3": "256",
            "head": "2048@tp 256",
        },
    ),
    Step(
        "vocabulary_loss",
        "vocabulary loss alone",
        {"x": "256@dp 128", "labels": "256@dp<2048"},
        {"head": "2048@tp 128"},
    ),
    Step(
        "sequence_block",
        "block with the sequence sharded",
        {"x": "4@dp 128@tp 256", "target": "4@dp 128@tp 256"},
        BLOCK,
    ),
    Step(
        "norm_linear",
        "norm of a sharded hidden dim, linear",
        {"x": "256@dp 512@tp", "target": "256@dp 512"},
        {"scale": "512@tp", "shift": "512@tp", "w": "512@tp 512", "b": "512@tp"},
    ),
    Step(
        "convolutions",
        "two convolutions and a pool, height sharded",
        {"x": "4@dp 3 64@tp 64", "target": "4@dp 16 32@tp 32"},
        {"w1": "16 3 3 3", "b1": "16", "w2": "16 16 3 3", "b2": "16"},
    ),
    Step(
        "experts",
        "16 experts, dense",
        {"x": "256@dp 128", "target": "256@dp 128"},
        {"gate": "16 128", "up": "16@tp 128 256", "down": "16@tp 256 128"},
    ),
    Step(
        "fused_mlp",
        "fused MLP: gate and up in one weight",
        {"x": "512@dp 256", "target": "512@dp 256"},
        {"up": "1024@tp 256", "down": "256 512@tp"},
    ),
    Step(
        "fused_attention",
        "fused attention: queries, keys and values in one weight",
        {"x": "4@dp 64 256", "target": "4@dp 64 256"},
        {"qkv": "768@tp 256", "wo": "256 256@tp"},
    ),
    Step(
        "gpt2",
        "GPT-2 block, embedding tied to the head",
        {"tokens": "4@dp 64<2048", "labels": "4@dp 64<2048"},
        {
            "embedding": "2048@tp 256",
            "positions": "64 256",
            "scale1": "256",
            "shift1": "256",
            "qkv": "768@tp 256",
            "qkv_bias": "768@tp",
            "wo": "256 256@tp",
            "wo_bias": "256",
            "scale2": "256",
            "shift2": "256",
            "up": "1024@tp 256",
            "up_bias": "1024@tp",
            "down": "256 1024@tp",
            "down_bias": "256",
            "scale3": "256",
            "shift3": "256",
        },
    ),
    Step(
        "residual_mlps",
        "four residual MLPs, data parallel",
        {"x": "256@dp@tp 128", "target": "256@dp@tp 128"},
        {
            **{f"up{i}": "256 128" for i in range(4)},
            **{f"down{i}": "128 256" for i in range(4)},
        },
    ),
    Step(
        "cross_attention",
        "cross attention of a short sequence, long one sharded",
        {"x": "4@dp 16 256", "context": "4@dp 512@tp 256", "target": "4@dp 16 256"},
        {"wq": "256 256", "wk": "256 256", "wv": "256 256", "wo": "256 256"},
    ),
    Step(
        "llama_block",
        "llama block: RMS norms, rotary embedding, grouped heads",
        {"x": "4@dp 64 256", "cos": "64 8", "sin": "64 8", "target": "4@dp 64 256"},
        {
            "scale1": "256",
            "wq": "256@tp 256",
            "wk": "128@tp 256",
            "wv": "128@tp 256",
            "wo": "256 256@tp",
            "scale2": "256",
            "gate": "512@tp 256",
            "up": "512@tp 256",
            "down": "256 512@tp",
        },
    ),
    Step(
        "residual_network",
        "ResNet block with batch norms, batch sharded",
        {"x": "32@dp@tp 16 16 16", "target": "32@dp@tp 16 16 16"},
        {
            "w1": "16 16 3 3",
            "scale1": "16",
            "shift1": "16",
            "w2": "16 16 3 3",
            "scale2": "16",
            "shift2": "16",
        },
    ),
    Step(
        "recurrent",
        "recurrent cell, four steps",
        {"x": "64@dp 4 128", "start": "64@dp 256", "target": "64@dp 64"},
        {"w": "256@tp 128", "u": "256@tp 256", "b": "256@tp", "head": "64 256@tp"},
    ),
    Step(
        "two_losses",
        "two losses that share a trunk",
        {"x": "256@dp 128", "target": "256@dp 64", "labels": "256@dp<1024"},
        {
            "up": "512@tp 128",
            "down": "128 512@tp",
            "scale": "128",
            "shift": "128",
            "regression": "64@tp 128",
            "classes": "1024@tp 128",
        },
    ),
)
