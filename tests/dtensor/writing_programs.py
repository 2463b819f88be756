"""Programs that take slices of a tensor, and slices of these, write to any of them and read any.
The same for the same seed, in every process.
"""

import torch


def step(rng, live, compiled=False):
    """One statement of a program: (its kind, what it reads or writes as a function of the live
    tensors). Compiled programs leave out two that torch does not keep: ``out=`` of a slice breaks
    the graph, and a list with a tensor in it twice is written to wrongly, of plain tensors too.
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
        return "take", rng.choice(
            [
                lambda x: x[i].narrow(d, a, b - a),
                lambda x: x[i].select(d, a),
                lambda x: x[i][(slice(None),) * d + (slice(a, b, c),)],
                lambda x: x[i].split(max(n // 2, 1), d)[-1],
                lambda x: x[i].transpose(0, d),
                lambda x: x[i].detach(),
                lambda x: x[i].view(-1) if x[i].is_contiguous() else x[i].unsqueeze(0),
            ]
        )
    k = rng.randint(1, 9)
    if kind == "write":
        writes = [
            lambda x: x[i].add_(k),
            lambda x: x[i].mul_(2),
            lambda x: x[i].fill_(k),
            lambda x: x[i].copy_(x[i].clone() + k),
            lambda x: x[i].add_(x[j].sum()),
            lambda x: torch._foreach_add_([x[i], x[j]], k),
            lambda x: torch.mul(x[i].clone(), 3, out=x[i]),
            lambda x: x[i].masked_fill_(x[i] > 20, k),
        ]
        if compiled:
            writes[5:7] = [lambda x: torch._foreach_add_([x[i]], k)]
        return "write", rng.choice(writes)
    if kind == "drop" and len(live) > 3:
        return "drop", i
    return "read", lambda x: x[i] + 1


def perform(step, live, found):
    kind, action = step
    if kind == "take":
        live.append(action(live))
    elif kind == "write":
        action(live)
    elif kind == "read":
        found.append(action(live))
    elif action:
        del live[action]


def drawn_program(rng, x):
    """Runs a program on x, and gives what it read; the same for the same seed."""
    live, found = [x], []
    for _ in range(14):
        perform(step(rng, live), live, found)
    return [*found, *live]


def program_to_compile(rng, full, gradients=False):
    """A function of one tensor, drawn for the sizes of the plain tensor full: it gives what it read
    and what it holds. For gradients it writes to an intermediate, and only what autograd takes.
    """

    def program(x):
        live, found = [x * 1 if gradients else x], []
        for one in steps:
            perform(one, live, found)
        return [v * 1 for v in [*found, *live]]

    while True:
        live, steps = [full.clone()], []
        for _ in range(14):
            steps.append(step(rng, live, compiled=True))
            perform(steps[-1], live, [])
        try:
            program(full.clone().requires_grad_(gradients))
            return program
        except RuntimeError:
            assert gradients  # a view of several, or a leaf's detached, that is written to
