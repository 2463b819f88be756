"""Patch 3: what of redistribution goes into it, and the hook in ``_redistribute.py``."""

from __future__ import annotations

from pathlib import Path

from upstream.edits import Hook, behind
from upstream.extract import Form, expanded
from upstream.stack import Patch
from upstream.wrap import formatted

HERE = Path(__file__).parent
MODULE = "torch/distributed/tensor/_exchange.py"
TEST = "test/distributed/tensor/test_exchange_redistribution.py"
REDISTRIBUTE = "torch/distributed/tensor/_redistribute.py"

# The smallest core: one exchange, in which a device sends itself what it keeps, replicas of a row
# do not share its sending, and every buffer is packed.
FORM = Form(
    leave=frozenset(
        {"Transfer.peak_elements", "_Buffer.lies_as", "_Buffer.of_source", "_Buffer.of_target"}
    ),
    edits={
        "Transfer": [
            (
                """

    ``packs`` is None where the source is the send buffer as it lies (if contiguous), ``unpacks``
    where the receive buffer is the target.
""",
                "\n",
            ),
            (
                "packs: tuple[Copy, ...] | None\n    own: tuple[Copy, ...]\n    unpacks: "
                "tuple[Copy, ...] | None",
                "packs: tuple[Copy, ...]\n    unpacks: tuple[Copy, ...]",
            ),
        ],
        "Step.chain": [
            (
                "return chain_of(chains[dim], self.mesh, device)",
                "return tuple([(f, self.mesh[m], device[m]) for m, f in chains[dim]])",
            ),
        ],
        "Exchange.message": [
            (
                "receiver: Device, turn: int = 0) -> Message | None:",
                "receiver: Device) -> list[Copy]:",
            ),
            (
                '"""What ``sender`` sends to ``receiver`` in that round, or None."""',
                '"""What ``sender`` has and ``receiver`` needs: x on the one, y on the other."""',
            ),
            (
                """        if not self.meet(sender, receiver):
            return None
""",
                "",
            ),
            ("                return None\n", "                return []\n"),
            (
                "return self._share(runs, sender, turn)",
                "return [from_runs(box) for box in product(*runs)]",
            ),
        ],
        "Exchange.transfer": [
            ("Sequence[Device | None], turn: int = 0)", "Sequence[Device])"),
            (
                """ in their order; None stands for
        a peer of another group. It keeps its own in the first round.
        """,
                """ in their order; to
        itself it sends what it keeps.
        """,
            ),
            (
                """
        own = self.own(device)

        def between(sender: Device | None, receiver: Device | None) -> Message | None:
            if sender is None or receiver is None:
                return None
            return own if sender == receiver else self.message(sender, receiver, turn)

        out = [between(device, peer) for peer in peers]
        into = [between(peer, device) for peer in peers]
        pack_free, unpack_free = self._as_they_lie(out, into, own, source_shape, target_shape)
        own_copies: list[Copy] = []
        if not (pack_free or unpack_free):
            own_copies = own.boxes if turn == 0 else []
            me = list(peers).index(device)
            out[me] = into[me] = None
        sending, receiving = _Buffer.of_source(out), _Buffer.of_target(into)
""",
                """        sending = _Buffer.of([self.message(device, peer) for peer in peers])
        receiving = _Buffer.of(
            [[copy.flipped for copy in self.message(peer, device)] for peer in peers]
        )
""",
            ),
            ("None if pack_free else ", ""),
            ("None if unpack_free else ", ""),
            ("            tuple(folded(own_copies)),\n", ""),
        ],
        "_Buffer": [("def _of(", "def of(")],
        "transfer_of": [
            (
                "mesh: Any, rank: int, gathers: bool = False, turn: int = 0)",
                "mesh: Any, rank: int)",
            ),
            ("(step: Step,", "(step: Exchange,"),
            (
                """    device, among = place(mesh, rank), peers(mesh, step.mesh_dims, rank)
    if isinstance(step, Exchange):
        return step.gathering(device, among) if gathers else step.transfer(device, among, turn)
    return step.transfer(device, among)""",
                "    device = places(mesh, rank)[rank]\n"
                "    return step.transfer(device, peers(mesh, step.dims, rank))",
            ),
        ],
        "checked": [
            ("raise OtherShape(", "raise RuntimeError("),
            (
                " in the shape that the plan expects, its values as they lie in memory. Sizes\n"
                "    that are symbols are not looked at.\n    ",
                " as it is packed, if it is of the shape that the spec says.\n    ",
            ),
            (
                """    if (
        symints.is_symbolic(tuple(local.shape))
        or tuple(local.shape[: len(part.source_shape)]) == part.source_shape
    ):
        return local
    if local.numel() == 0 == prod(part.source_shape) or _without_ones(local.shape) == _without_ones(
        part.source_shape
    ):
        return local.reshape(part.source_shape)  # torch's in-place squeeze leaves such tensors
""",
                """    if tuple(local.shape) == part.source_shape:
        return local.contiguous()
""",
            ),
        ],
        "pack": [
            (
                """    if part.packs is None:
        return local.contiguous().view(-1)
    if fills(part.packs, (sum(part.sends),)):
        return read(local, part.packs[0]).reshape(-1)
""",
                """    if not part.packs:
        # Of the tensor all the same: or a compiler takes the exchange of a gradient, of
        # which nothing is sent, for part of the forward pass.
        return local.view(-1)[:0]
""",
            )
        ],
        "unpack": [
            (
                "part: Transfer, received: torch.Tensor, local: torch.Tensor, "
                "target: torch.Tensor | None = None",
                "part: Transfer, received: torch.Tensor",
            ),
            (
                """The target, from what was received and what this rank keeps; or more of it into
    ``target``.
    \"""
""",
                """The target, from what was received.\"""
""",
            ),
            (
                """    if part.unpacks is None:
        return received.view(part.target_shape)
    if target is None and not part.own and fills(part.unpacks, part.target_shape):
        return (
            read(received, part.unpacks[0])
            .clone(memory_format=torch.contiguous_format)
            .view(part.target_shape)
        )
    if target is None:
        target = local.new_empty(part.target_shape)
""",
                """    if not part.unpacks:
        # Of the buffer all the same: or a compiler leaves the exchange out.
        return received.view(part.target_shape)
    target = received.new_empty(part.target_shape)
""",
            ),
            (
                """    if part.own:
        local = checked(part, local)
    for copy in part.own:
        write(copy, local, target)
""",
                "",
            ),
        ],
        "write": [
            (", *, add: bool = False)", ")"),
            (
                "Between tensors of which ``y`` is ours, as it was made: so we know how it lies. "
                "Of ``x`` we\n    do only where nothing is compiled, as a compiler lays out what "
                "it computes as it likes.\n",
                "Between contiguous tensors.\n",
            ),
            (
                "    _ = into.add_(read(x, copy)) if add else into.copy_(read(x, copy))",
                "    into.copy_(_strided(x, copy.sizes, copy.x, copy.dx))",
            ),
        ],
        "_strided": [
            (
                """    lying = (
        _lying.__wrapped__ if symints.is_symbolic(strides) else _lying
    )  # symbols cannot be looked up
    stride, offset = lying(strides, start, steps)
    return tensor.as_strided(
        (*sizes, *tensor.shape[rest:]), stride, tensor.storage_offset() + offset
    )""",
                """    stride = [flat(step, strides) for step in steps]
    offset = tensor.storage_offset() + flat(start, strides)
    return tensor.as_strided(sizes, stride, offset)""",
            ),
            ("strides, rest = tensor.stride(), len(start)", "strides = tensor.stride()"),
        ],
        "places": [
            (
                "    found = next((ranks for ranks in process_groups.rank_lists(mesh) "
                "if rank in ranks), None)\n    if found is None:\n"
                '        raise RuntimeError(f"rank {rank} is not on the mesh {mesh}")\n',
                """    with _disable_current_modes():
        lists = mesh._layout.remap_to_tensor(mesh._rank_map).flatten(1).tolist()
    found = next(ranks for ranks in lists if rank in ranks)
""",
            ),
        ],
        "peers": [("place(mesh, rank), [", "places(mesh, rank)[rank], [")],
    },
)


def module() -> str:
    """``_exchange.py``."""
    text = expanded((HERE / "_exchange.py.in").read_text(), FORM)
    return formatted(text.replace("mesh: Any", "mesh: DeviceMesh"))


def test() -> str:
    """Its tests, which are PyTorch's in form and have no counterpart here."""
    return formatted((HERE / "test_exchange_redistribution.py.in").read_text())


HOOKS: tuple[Hook, ...] = (
    Hook(REDISTRIBUTE, "import math\nimport weakref\n", "import math\nimport os\nimport weakref\n"),
    behind(
        REDISTRIBUTE,
        "_DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION: bool = False\n",
        """
# Whether redistribution goes by one exchange where steps mesh dim by mesh dim would
# receive elements twice, or are not right (_exchange.py). Read once.
_USE_CUTE_REDISTRIBUTION = os.environ.get("USE_CUTE_REDISTRIBUTION", "0") == "1"
""",
    ),
    behind(
        REDISTRIBUTE,
        """        # which should be an empty tensor
        return local_tensor

""",
        """    if _USE_CUTE_REDISTRIBUTION:
        from torch.distributed.tensor._exchange import redistribute_by_exchange

        exchanged = redistribute_by_exchange(
            local_tensor, current_spec, target_spec, is_explicit=is_explicit
        )
        if exchanged is not None:
            if not async_op and isinstance(exchanged, funcol.AsyncCollectiveTensor):
                exchanged = exchanged.wait()
            return exchanged

""",
    ),
)

PATCH = Patch(
    name="exchange-redistribution",
    message=(HERE / "message.txt").read_text(),
    files={MODULE: module, TEST: test},
    hooks=HOOKS,
)
