"""Programs that take slices of a tensor, and slices of these, write to any of them and read any.
The same for the same seed, in every process.
"""

import torch


def step(rng, live, compiled=False):
    """One statement of a program: (its kind, what it reads or writes as a function of the live
    tensors, the number of the first of them). Compiled programs leave out one that torch does not
    keep: ``out=`` of a slice breaks the graph.
    """
    i, j = rng.randrange(len(live)), rng.randrange(len(live))
    shape = live[i].shape
    kind = rng.choice(["take", "take", "write", "write", "read", "drop"])
    if kind == "take" and live[i].ndim and 0 not in shape:
        d = rng.randrange(live[i].ndim)
        n = shape[d]
        a = rng.randrange(n)
        b = rng.randint(a + 1, n)
        c = rng.choice([1, 1, 2])
        takes = [
            lambda x: x[i].narrow(d, a, b - a),
            lambda x: x[i].select(d, a),
            lambda x: x[i][(slice(None),) * d + (slice(a, b, c),)],
            lambda x: x[i].split(max(n // 2, 1), d)[-1],
            lambda x: x[i].transpose(0, d),
            lambda x: x[i].detach(),
            lambda x: x[i].view(-1) if x[i].is_contiguous() else x[i].unsqueeze(0),
        ]
        return "take", rng.choice(takes), i
    k = rng.randint(1, 9)
    if kind == "write":
        writes = [
            lambda x: x[i].add_(k),
            lambda x: x[i].mul_(2),
            lambda x: x[i].fill_(k),
            lambda x: x[i].copy_(x[i].clone() + k),
            lambda x: x[i].add_(x[j].sum()),
            lambda x: torch._foreach_add_([x[i]], k),
            lambda x: torch.mul(x[i].clone(), 3, out=x[i]),
            lambda x: x[i].masked_fill_(x[i] > 20, k),
        ]
        if compiled:
            del writes[6]
        return "write", rng.choice(writes), i
    if kind == "drop" and len(live) > 3:
        return "drop", i, i
    return "read", lambda x: x[i] + 1, i


def perform(step, live, found):
    kind, action, _ = step
    if kind == "take":
        live.append(action(live))
    elif kind == "write":
        action(live)
    elif kind == "read":
        found.append(action(live))
    elif kind == "keep":
        live[:] = [live[0], live[action]] if action else [live[0]]
    elif action:
        del live[action]


def drawn_program(rng, x, raises=(), raised=()):
    """Runs a program on x, and gives what it read and what it still holds. The same for the same
    seed, if the same statements raise.

    Args:
        raises: a class of errors. A statement that raises one is skipped, and its number is added
            to ``raised``.
        raised: without ``raises``, the numbers of statements to skip.
    """
    live, found = [x], []
    for number in range(14):
        one = step(rng, live)
        if not raises and number in raised:
            continue
        try:
            perform(one, live, found)
        except raises:
            raised.append(number)
    return [*found, *live]


def program_to_compile(rng, full, gradients=False):
    """A function of one tensor, drawn for the sizes of the plain tensor full: it gives what it read
    and what it holds. For gradients it writes to an intermediate, and only what autograd takes.
    After a write it goes on with the whole tensor and what was written to: no view is stale.
    """

    def program(x):
        live, found = [x * 1 if gradients else x], []
        for one in steps:
            perform(one, live, found)
        return [v * 1 for v in [*found, *live]]

    while True:
        live, steps = [full.clone()], []
        for _ in range(14):
            drawn = [step(rng, live, compiled=True)]
            if drawn[0][0] == "write":
                drawn.append(("keep", drawn[0][2], None))
            for one in drawn:
                perform(one, live, [])
            steps += drawn
        try:
            program(full.clone().requires_grad_(gradients))
            return program
        except RuntimeError:
            assert gradients  # a view of several, or a leaf's detached, that is written to
