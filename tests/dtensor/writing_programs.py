"""Programs that take slices of a tensor, and slices of these, write to any of them and read any.
The same for the same seed, in every process.
"""

import torch


def step(rng, live):
    """One statement of a program: (what it reads or writes, as a function of the live tensors)."""
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
        return "write", rng.choice(
            [
                lambda x: x[i].add_(k),
                lambda x: x[i].mul_(2),
                lambda x: x[i].fill_(k),
                lambda x: x[i].copy_(x[i].clone() + k),
                lambda x: x[i].add_(x[j].sum()),
                lambda x: torch._foreach_add_([x[i], x[j]], k),
                lambda x: torch.mul(x[i].clone(), 3, out=x[i]),
                lambda x: x[i].masked_fill_(x[i] > 20, k),
            ]
        )
    if kind == "drop" and len(live) > 3:
        return "drop", i
    return "read", lambda x: x[i] + 1


def drawn_program(rng, x):
    """Runs a program on x, and gives what it read; the same for the same seed."""
    live, found = [x], []
    for _ in range(14):
        kind, action = step(rng, live)
        if kind == "take":
            live.append(action(live))
        elif kind == "write":
            action(live)
        elif kind == "read":
            found.append(action(live))
        elif action:
            del live[action]
    return [*found, *live]
