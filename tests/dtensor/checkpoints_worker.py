"""What the processes of test_checkpoints.py run: every rank draws the same tensors, meshes and
placements, saves, loads elsewhere, and compares its own part with the whole.
"""

import random
import shutil
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from across_worker import Sent, draw_ranks
from drawing import draw_placements, draw_shape
from drawn_moves import drawn_program
from refit_worker import DTYPES, Lies, drawn_values

import cute_sharding
from cute_sharding import load_checkpoint


class Counting(dcp.FileSystemReader):
    """Counts what is read: how often each chunk, and bytes, as storage has them."""

    def __init__(self, path):
        super().__init__(path)
        self.chunks, self.bytes = Counter(), Counter()

    def read_data(self, plan, planner):
        for item in plan.items:
            self.chunks[item.storage_index] += 1
            self.bytes[item.type.name] += self.storage_data[item.storage_index].length
        return super().read_data(plan, planner)


def told_by_all(value):
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def saved(folder, state, group, members):
    """A checkpoint of what those ranks have."""
    if dist.get_rank() in members:
        with cute_sharding.enabled():
            dcp.save(state, checkpoint_id=folder, process_group=group)
    dist.barrier()


@contextmanager
def a_folder(parent, name):
    """Gone behind it: draws are many."""
    folder = Path(parent) / name
    yield str(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)


class Draw:
    """Tensors on a mesh, and what a state on another mesh is to get of them."""

    def __init__(self, seed, meshes):
        rng = self.rng = random.Random(seed)
        world = dist.get_world_size()
        self.one = draw_ranks(rng, world)
        other = rng.choice([draw_ranks(rng, world), self.one, rng.sample(self.one, len(self.one))])
        self.source, self.target = (Lies(rng, ranks, meshes) for ranks in (self.one, other))
        self.generator = None
        if rng.random() < 0.4:
            program = drawn_program(seed)
            self.whole = self._named(drawn_values(rng, program.shapes))
            self.generator = lambda w: self._named(program([w[k] for k in sorted(w)]), "result")
            self.wanted = self.generator(self.whole)
        else:
            shapes = [draw_shape(rng) for _ in range(rng.randint(1, 7))]
            self.wanted = self.whole = self._named(drawn_values(rng, [*shapes, ()]))
        self.said = (
            f"seed {seed}: {self.one} as {self.source.sizes} -> {other}, {self.target.sizes}"
        )

    @staticmethod
    def _named(tensors, name="w"):
        return {f"{name}{k}": x.contiguous() for k, x in enumerate(tensors)}

    def state(self):
        """What is saved."""
        found = {}
        for name, whole in self.whole.items():
            placements = draw_placements(self.rng, self.source.sizes, whole.shape)
            is_plain = self.rng.random() < 0.1
            found[name] = whole if is_plain else self.source.dtensor(whole, placements)
        return found

    def into(self):
        """Of other values, and sometimes of another dtype or in another order of memory."""
        found = {}
        for name, whole in self.wanted.items():
            dtype = self.rng.choice([whole.dtype, whole.dtype, *DTYPES])
            if self.generator is None:
                self.wanted[name] = whole = whole.to(dtype)
            other = torch.full_like(whole, 99)
            placements = draw_placements(self.rng, self.target.sizes, whole.shape)
            is_turned = self.rng.random() < 0.2
            if self.rng.random() < 0.1:
                found[name] = other
                continue
            found[name] = self.target.dtensor(other, placements)
            local = found[name]._local_tensor
            if is_turned and local.ndim > 1:
                found[name]._local_tensor = turned(local)
        return found

    def assert_loaded(self, state):
        for name, x in state.items():
            said = f"{self.said}, {name}"
            if isinstance(x, torch.distributed.tensor.DTensor):
                self.target.assert_holds(x, self.wanted[name], said)
            else:
                assert torch.equal(x, self.wanted[name]), said


def drawn(first, stop, parent):
    """Draws in [first, stop)."""
    meshes, groups, ran, limited = {}, {}, 0, 0
    for seed in range(first, stop):
        draw = Draw(seed, meshes)
        members = tuple(sorted(draw.one))
        if members not in groups:
            groups[members] = dist.new_group(members)
        with a_folder(parent, f"{seed}") as folder:
            saved(folder, draw.state(), groups[members], members)
            into = draw.into()
            reader = Counting(folder)
            # One chunk, and what each of three others is sent of it.
            limit = draw.rng.choice([None, 4]) and 4 * max([*sizes_in(reader).values(), 1])
            with Sent() as sent:
                done = load_checkpoint(into, reader, refit=draw.generator, memory_limit=limit)
            ran += 1
            limited += limit is not None and done.collectives > 1
            draw.assert_loaded(into)
            assert sum(sent.counts.values()) == done.collectives, (draw.said, sent.counts, done)
            check_read(draw, reader, done)
    assert ran > 0.8 * (stop - first) and (limited or stop - first < 100), (ran, limited)


def sizes_in(reader):
    """The bytes of each chunk of a checkpoint."""
    return {
        (name, tuple(chunk.offsets)): chunk.sizes.numel() * each.properties.dtype.itemsize
        for name, each in reader.read_metadata().state_dict_metadata.items()
        for chunk in each.chunks
        if chunk.sizes.numel()
    }


def check_read(draw, reader, done):
    """Each chunk once over all ranks, of those that something is made of; and as much by each."""
    every = told_by_all((reader.chunks, done.read_bytes))
    chunks = sum((some for some, _ in every), Counter())
    assert all(n == 1 for n in chunks.values()), (draw.said, chunks)
    sizes = sizes_in(reader)
    keys = [(index.fqn, tuple(index.offset)) for index in chunks]
    found = {key: sizes[key] for key in keys}
    read = [n for _, n in every]
    assert sum(read) == sum(found.values()), draw.said
    if draw.generator is None:
        assert found.keys() == sizes.keys(), (draw.said, found, sizes)
    most = sum(read) / len(read) * 9 / 8 + max(found.values(), default=0)
    assert max(read) <= most, (draw.said, read)


def turned(x):
    """The same tensor in another order of memory."""
    return x.movedim(0, -1).contiguous().movedim(-1, 0) if x.ndim else x


def drawn_files(first, stop, parent):
    """The same of a file of whole tensors, which the first rank alone has."""
    meshes, most = {}, 0
    for seed in range(first, stop):
        draw = Draw(seed, meshes)
        with a_folder(parent, f"file{seed}") as folder:
            path = Path(folder) / "state.pt"
            is_turned = draw.rng.random() < 0.3
            if dist.get_rank() == 0:
                path.parent.mkdir()
                whole = draw.whole.items()
                torch.save({name: turned(x) if is_turned else x for name, x in whole}, path)
            into = draw.into()
            limit = draw.rng.choice([None, 200, 1000])
            mine = path if dist.get_rank() == 0 else "/nowhere"
            done = load_checkpoint(into, mine, refit=draw.generator, memory_limit=limit)
            most = max(most, done.collectives)
            draw.assert_loaded(into)
    assert most > 1 or stop - first < 100
