"""The training steps of :mod:`benchmarks.training_steps` as programs of JAX: each function computes
a loss from its operands by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, nn

from benchmarks.training_steps import RATE, Step

Array = Any


def once(step: Step) -> Callable[..., Any]:
    """A function of (weights, inputs) that runs a step with SGD: the loss, and the new weights."""
    loss = globals()[step.name]

    def run(weights: dict[str, Array], inputs: dict[str, Array]) -> Any:
        found, slopes = jax.value_and_grad(lambda some: loss(**inputs, **some))(weights)
        return found, jax.tree.map(lambda w, slope: w - RATE * slope, weights, slopes)

    return run


# -- parts -----------------------------------------------------------------------------------------


def square_error(x: Array, target: Array) -> Array:
    return ((x - target) ** 2).mean()


def cross_entropy(logits: Array, labels: Array) -> Array:
    chosen = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return (nn.logsumexp(logits, -1) - chosen).mean()


def linear(x: Array, w: Array, b: Array | float = 0.0) -> Array:
    return jnp.einsum("...i,oi->...o", x, w) + b


def layer_norm(x: Array, scale: Array | float = 1.0, shift: Array | float = 0.0) -> Array:
    found = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return found * scale + shift


def rms_norm(x: Array, scale: Array) -> Array:
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def heads(x: Array, n: int) -> Array:
    return x.reshape(*x.shape[:2], n, -1)


def attention(q: Array, k: Array, v: Array, causal: bool = False) -> Array:
    """Of heads that are the third dim; the result has them side by side."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -jnp.inf)
    x = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores, -1), v)
    return x.reshape(*x.shape[:2], -1)


def block(
    x: Array,
    scale1: Array,
    shift1: Array,
    wq: Array,
    wk: Array,
    wv: Array,
    wo: Array,
    scale2: Array,
    shift2: Array,
    up: Array,
    down: Array,
    causal: bool,
) -> Array:
    y = layer_norm(x, scale1, shift1)
    q, k, v = (heads(linear(y, w), 8) for w in (wq, wk, wv))
    x = x + linear(attention(q, k, v, causal), wo)
    return x + linear(nn.gelu(linear(layer_norm(x, scale2, shift2), up)), down)


def rotated(x: Array, cos: Array, sin: Array) -> Array:
    first, second = jnp.split(x, 2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def convolved(x: Array, w: Array) -> Array:
    return lax.conv_general_dilated(x, w, (1, 1), [(1, 1), (1, 1)])


def batch_norm(x: Array, scale: Array, shift: Array) -> Array:
    dims = (0, 2, 3)
    x = (x - x.mean(dims, keepdims=True)) * lax.rsqrt(x.var(dims, keepdims=True) + 1e-5)
    return x * scale[:, None, None] + shift[:, None, None]


# -- steps -----------------------------------------------------------------------------------------


def diffusion_block(
    x: Array,
    c: Array,
    target: Array,
    modulation: Array,
    bias: Array,
    wq: Array,
    wk: Array,
    wv: Array,
    wo: Array,
    up: Array,
    down: Array,
) -> Array:
    change = linear(nn.silu(c), modulation, bias)[:, None]
    shift1, scale1, gate1, shift2, scale2, gate2 = jnp.split(change, 6, -1)
    y = layer_norm(x) * (1 + scale1) + shift1
    q, k, v = (heads(linear(y, w), 8) for w in (wq, wk, wv))
    x = x + gate1 * linear(attention(q, k, v), wo)
    y = layer_norm(x) * (1 + scale2) + shift2
    return square_error(x + gate2 * linear(nn.gelu(linear(y, up)), down), target)


def language_model(
    tokens: Array,
    labels: Array,
    embedding: Array,
    head: Array,
    scale3: Array,
    shift3: Array,
    **weights: Array,
) -> Array:
    x = block(embedding[tokens], **weights, causal=True)
    return cross_entropy(linear(layer_norm(x, scale3, shift3), head), labels)


def vocabulary_loss(x: Array, labels: Array, head: Array) -> Array:
    return cross_entropy(linear(x, head), labels)


def sequence_block(x: Array, target: Array, **weights: Array) -> Array:
    return square_error(block(x, **weights, causal=False), target)


def norm_linear(x: Array, target: Array, scale: Array, shift: Array, w: Array, b: Array) -> Array:
    return square_error(linear(layer_norm(x, scale, shift), w, b), target)


def convolutions(x: Array, target: Array, w1: Array, b1: Array, w2: Array, b2: Array) -> Array:
    x = nn.relu(convolved(x, w1) + b1[:, None, None])
    x = nn.relu(convolved(x, w2) + b2[:, None, None])
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    return square_error(x, target)


def experts(x: Array, target: Array, gate: Array, up: Array, down: Array) -> Array:
    share = nn.softmax(linear(x, gate), -1)
    y = nn.relu(jnp.einsum("td,edh->eth", x, up))
    y = jnp.einsum("eth,ehd->etd", y, down)
    return square_error(jnp.einsum("te,etd->td", share, y), target)


def fused_mlp(x: Array, target: Array, up: Array, down: Array) -> Array:
    gate, y = jnp.split(linear(x, up), 2, -1)
    return square_error(linear(nn.silu(gate) * y, down), target)


def fused_attention(x: Array, target: Array, qkv: Array, wo: Array) -> Array:
    q, k, v = (heads(y, 8) for y in jnp.split(linear(x, qkv), 3, -1))
    return square_error(linear(attention(q, k, v), wo), target)


def gpt2(
    tokens: Array,
    labels: Array,
    embedding: Array,
    positions: Array,
    scale1: Array,
    shift1: Array,
    qkv: Array,
    qkv_bias: Array,
    wo: Array,
    wo_bias: Array,
    scale2: Array,
    shift2: Array,
    up: Array,
    up_bias: Array,
    down: Array,
    down_bias: Array,
    scale3: Array,
    shift3: Array,
) -> Array:
    x = embedding[tokens] + positions
    y = linear(layer_norm(x, scale1, shift1), qkv, qkv_bias)
    q, k, v = (heads(z, 8) for z in jnp.split(y, 3, -1))
    x = x + linear(attention(q, k, v, causal=True), wo, wo_bias)
    y = nn.gelu(linear(layer_norm(x, scale2, shift2), up, up_bias))
    x = layer_norm(x + linear(y, down, down_bias), scale3, shift3)
    return cross_entropy(linear(x, embedding), labels)


def residual_mlps(x: Array, target: Array, **weights: Array) -> Array:
    for i in range(4):
        x = x + linear(nn.relu(linear(x, weights[f"up{i}"])), weights[f"down{i}"])
    return square_error(x, target)


def cross_attention(
    x: Array, context: Array, target: Array, wq: Array, wk: Array, wv: Array, wo: Array
) -> Array:
    q, k, v = heads(linear(x, wq), 8), *(heads(linear(context, w), 8) for w in (wk, wv))
    return square_error(linear(attention(q, k, v), wo), target)


def llama_block(
    x: Array,
    cos: Array,
    sin: Array,
    target: Array,
    scale1: Array,
    wq: Array,
    wk: Array,
    wv: Array,
    wo: Array,
    scale2: Array,
    gate: Array,
    up: Array,
    down: Array,
) -> Array:
    y = rms_norm(x, scale1)
    q = rotated(heads(linear(y, wq), 16), cos, sin)
    k, v = rotated(heads(linear(y, wk), 8), cos, sin), heads(linear(y, wv), 8)
    k, v = (jnp.repeat(each, 2, 2) for each in (k, v))
    x = x + linear(attention(q, k, v, causal=True), wo)
    y = rms_norm(x, scale2)
    return square_error(x + linear(nn.silu(linear(y, gate)) * linear(y, up), down), target)


def residual_network(
    x: Array,
    target: Array,
    w1: Array,
    scale1: Array,
    shift1: Array,
    w2: Array,
    scale2: Array,
    shift2: Array,
) -> Array:
    y = nn.relu(batch_norm(convolved(x, w1), scale1, shift1))
    y = nn.relu(x + batch_norm(convolved(y, w2), scale2, shift2))
    return square_error(y, target)


def recurrent(
    x: Array, start: Array, target: Array, w: Array, u: Array, b: Array, head: Array
) -> Array:
    h = start
    for i in range(x.shape[1]):
        h = jnp.tanh(linear(x[:, i], w, b) + linear(h, u))
    return square_error(linear(h, head), target)


def two_losses(
    x: Array,
    target: Array,
    labels: Array,
    up: Array,
    down: Array,
    scale: Array,
    shift: Array,
    regression: Array,
    classes: Array,
) -> Array:
    trunk = layer_norm(x + linear(nn.relu(linear(x, up)), down), scale, shift)
    error = square_error(linear(trunk, regression), target)
    return error + cross_entropy(linear(trunk, classes), labels)
