"""Calls of ops that differ in one argument: those that torch's samples of its ops make of aten ops,
and each again with other values in the place of each of its arguments that is no tensor.
"""

from __future__ import annotations

import random
from contextlib import suppress
from itertools import islice

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from cute_sharding.dtensor.bookkeeping import kept
from cute_sharding.dtensor.replaced import op_schemas

# Of each aten op, so many calls of the samples, with so many other values for each argument.
CALLS, OTHERS, SAMPLES = 3, 3, 8
LARGEST = 4096  # elements of an operand
# Of plain tensors, their kernels end the process with some arguments.
CRASHING = ("native_batch_norm_backward", "_embedding_bag_backward", "_fft_c2r")


class _Recorded(TorchDispatchMode):
    """Keeps the calls of aten ops, with copies of their tensors as they were."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        kept_calls = self.calls.setdefault(op, {})
        if op._opname in CRASHING:
            tensors = []
        if tensors and len(kept_calls) < CALLS and all(map(_is_plain, tensors)):
            key = repr(tree_map(_described, (args, kwargs)))
            if key not in kept_calls:
                kept_calls[key] = tree_map(_copied, (args, kwargs))
        return op(*args, **kwargs)


def _is_plain(x):
    return x.layout is torch.strided and x.numel() <= LARGEST and not x.is_quantized


def _copied(x):
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def calls_of(infos):
    """{op: [(args, kwargs)]}: the calls that torch's samples make, forward and backward."""
    calls = {}
    for info in infos:
        for dtype in {torch.float32, torch.int64} & set(info.dtypes):
            torch.manual_seed(0)
            grad = info.supports_autograd and dtype.is_floating_point
            try:
                samples = [*islice(info.sample_inputs("cpu", dtype, requires_grad=grad), SAMPLES)]
            except Exception:  # of ops that this build of torch lacks
                samples = []
            for sample in samples:
                with _Recorded(calls), suppress(Exception):
                    _run(info.op, sample)
    return {op: [*some.values()] for op, some in calls.items() if some}


def _run(op, sample):
    result = op(sample.input, *sample.args, **sample.kwargs)
    results = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor) and x.requires_grad]
    if results:
        sum(x.abs().sum() for x in results).backward()


_EVERY = {
    "ScalarTypeType": [
        *(torch.float32, torch.float64, torch.int64, torch.int32, torch.int16, torch.uint8),
    ],
    "StringType": [
        *("none", "tanh", "floor", "trunc", "sum", "mean", "amax", "prod", "L", "U", "right"),
    ],
    "MemoryFormatType": [torch.contiguous_format, torch.preserve_format, torch.channels_last],
    "BoolType": [False, True],
}


def others_of(value, declared):
    """Other values for an argument of this type, some of which the op may refuse."""
    none = []
    if isinstance(declared, torch.OptionalType):
        declared = declared.getElementType()
        none = [None] if value is not None else []
    if isinstance(declared, torch.ListType):
        return none + _other_lists(value, declared.getElementType())
    kind = declared.kind()
    if kind in ("IntType", "SymIntType"):
        base = 0 if value is None else value
        found = [base + 1, base - 1, 0, 1, 2, -1, 3]
    elif kind in ("FloatType", "NumberType"):
        base = value if isinstance(value, int | float) else 1
        found = [base + 1, 0.5 * base, 2, 0.0, float("inf")]
        found += [0.5, 2.5, 3] if kind == "NumberType" else []
    else:
        found = _EVERY.get(kind, [])
    return none + [x for x in found if type(x) is not type(value) or x != value]


def _other_lists(value, element):
    if "Tensor" in str(element):
        return []
    if not value:
        return [[0], [1], [1, 1], [2, 2]]
    values, found = list(value), []
    for i, each in enumerate(values):
        found += [[*values[:i], other, *values[i + 1 :]] for other in others_of(each, element)[:2]]
    found += [values[::-1], [2 * x for x in values], values[:-1]]
    return [each for each in found if each != values]


def pairs_of(op, calls):
    """[(args, kwargs, other args, other kwargs, where)]: calls of the op and others that differ in
    one argument, both of which one device runs.
    """
    draw, declared, found = random.Random(str(op)), op._schema.arguments, []
    for args, kwargs in calls:
        for i, each in enumerate(declared):
            if each.kwarg_only:
                value = kwargs.get(each.name, each.default_value)
            else:
                value = args[i] if i < len(args) else each.default_value
            if any(isinstance(x, torch.Tensor) for x in tree_leaves(value)):
                continue
            others = others_of(value, each.real_type)
            draw.shuffle(others)
            taken = 0
            for other in others:
                changed = _with(declared, args, kwargs, i, other)
                if taken < OTHERS and _runs(op, *changed):
                    found.append((args, kwargs, *changed, f"{each.name}={value!r} or {other!r}"))
                    taken += 1
    return found


def _with(declared, args, kwargs, i, other):
    """The arguments, with another value of the one that is declared as number ``i``."""
    if declared[i].kwarg_only:
        return args, {**kwargs, declared[i].name: other}
    filled = [*args, *(each.default_value for each in declared[len(args) : i])]
    return (*filled[:i], other, *filled[i + 1 :]), kwargs


def _runs(op, args, kwargs):
    try:
        torch.manual_seed(0)
        op(*tree_map(_copied, args), **tree_map(_copied, kwargs))
    except Exception:
        return False
    return True


def distributed(args, kwargs, mesh, draw):
    """The arguments, with DTensors in place of tensors."""
    leaves, form = tree_flatten((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    shape = max((tuple(x.shape) for x in tensors), key=len)
    d = draw.randrange(len(shape)) if shape else 0
    how = draw.choice(["replicated", "first", "alike"])
    made = 0
    found = []
    for x in leaves:
        if isinstance(x, torch.Tensor):
            cut = x.ndim > d and (how == "alike" or (how == "first" and made == 0))
            place = Shard(d) if cut else Replicate()
            made += 1
            x = distribute_tensor(x.detach().clone(), mesh, [place], src_data_rank=None)
        found.append(x)
    return tree_unflatten(found, form)


def outcome(op, args, kwargs, mesh, seed):
    """What a call returns, as text: placements, sizes, strides and dtypes; or that it raises."""
    args, kwargs = distributed(args, kwargs, mesh, random.Random(seed))
    try:
        torch.manual_seed(0)
        result = op(*args, **kwargs)
    except Exception as error:
        return f"raises {type(error).__name__}: {str(error)[:200]}"
    text = repr(tree_map(_described, [result, args, kwargs]))
    return text.replace("_NormPartial(2.0)", "_NormPartial(2)")  # they are equal


def _described(x):
    if isinstance(x, DTensor):
        meta, local = x._spec.tensor_meta, x._local_tensor
        return (
            x.placements,
            tuple(meta.shape),
            meta.stride,
            meta.dtype,
            tuple(local.shape),
            local.stride(),
            local.dtype,
            x.dtype,
        )
    if isinstance(x, torch.Tensor):
        return "plain", tuple(x.shape), x.stride(), x.dtype
    return x


def answers_of_other_calls(calls, mesh):
    """[(where, answer, fresh answer)]: what the second call of each pair answers after the first,
    and with empty caches.
    """
    found = []
    for op, some in calls.items():
        for *pair, where in pairs_of(op, some):
            where = f"{op}, {where}"
            empty_caches()
            fresh = outcome(op, *pair[2:], mesh, where)
            empty_caches()
            outcome(op, *pair[:2], mesh, where)
            found.append((where, outcome(op, *pair[2:], mesh, where), fresh))
    return found


def answer_of_second(calls, mesh, wanted):
    """What the second call of the pair ``wanted`` answers, of a process that runs nothing else."""
    for op, some in calls.items():
        for *pair, where in pairs_of(op, some):
            if wanted == f"{op}, {where}":
                return outcome(op, *pair[2:], mesh, wanted)
    raise KeyError(wanted)


def empty_caches():
    op_schemas.clear_propagation_caches()
    kept.empty()
