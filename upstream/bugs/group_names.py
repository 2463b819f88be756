"""Names of process groups that only their members make."""

from __future__ import annotations

from pathlib import Path

from upstream.edits import EitherHook, Hook, behind, either
from upstream.stack import Patch
from upstream.wrap import formatted

HERE = Path(__file__).parent
GROUPS = "torch/distributed/distributed_c10d.py"
THREADS = "torch/testing/_internal/distributed/multi_threaded_pg.py"
TEST = "test/distributed/test_group_names.py"

MESSAGE = """[c10d] Give a process group the same name on all its ranks

Only some ranks call split_group or new_group(use_local_synchronization=True).
Each of these ranks hashes the ranks of the group and a count into the group's
name. Up to 2.13, the count is the number of groups that the rank is in. Since
2.14, the count is the number of groups that the rank has named. If groups
overlap, the counts differ between ranks. Example:

  new_group([0, 1], use_local_synchronization=True)   # on ranks 0 and 1
  new_group([1, 2], use_local_synchronization=True)   # on ranks 1 and 2: timeout

Since 2.14, the count also names groups that all ranks make. After a group that
only its members made, any new_group times out.

With the patch, the count is the number of earlier groups with exactly the same
ranks, which all members of the group have been in. split_group now also uses
global ranks. The count resets only when the default group is destroyed, so a
group that is destroyed and made again gets a new name.

Cost: 26 lines added and 6 removed (2.13), or 30 and 15 (2.14).

Test plan (fails without the patch; split_group is not covered, because it needs
an accelerator):
  python test/distributed/test_group_names.py
"""


def test() -> str:
    """Its test."""
    return formatted((HERE / "test_group_names.py.in").read_text())


COUNTED = """    # Of groups of the same ranks the count is their number so far. Whatever else the
    # ranks have made, or have not, on this they agree: each was in all of these groups.
    counts = _world.hashed_group_counts
    count = counts.get(tuple(ranks), 0)
    counts[tuple(ranks)] = count + 1
    unique_str = "_".join([rank_join, str(count)])
"""
BY_ALL = """        # These are made by all ranks, and counted alone: so all agree on the count.
        _world.group_count += 1
    return pg_name
"""
STATE = "hashed_group_counts: dict[tuple[int, ...], int]"
MY_RANKS = (
    "    global_ranks_in_my_group = [parent_group_to_global_ranks[rank] for rank in my_group]\n"
)


def _reset(behind_it: str) -> Hook:
    line = "        _world.group_count = 0\n"
    after = f"    else:\n        {behind_it}\n"
    return Hook(GROUPS, line + after, f"{line}        _world.hashed_group_counts.clear()\n{after}")


def _world(field: str) -> str:
    """The last lines of WorldData up to 2.14, and where it is made, with a field more."""
    return f"""    comms: list
{f"    {field}{chr(10)}" if field else ""}

class ThreadLocalWorld:
    _world = threading.local()

    def _get_world(self) -> WorldData:
        if not hasattr(ThreadLocalWorld._world, "world"):
            ThreadLocalWorld._world.world = WorldData(
                None, {{}}, {{}}, {{}}, {{}}, 0, {{}}, {{}}, {{}}, []{", {}" if field else ""}
            )
"""


HOOKS: tuple[Hook | EitherHook, ...] = (
    behind(GROUPS, "\n_group_count = 0\n", f"_{STATE} = {{}}\n"),
    behind(
        GROUPS,
        "        global _group_count\n        _group_count = value\n",
        '''
    @property
    def hashed_group_counts(self) -> dict[tuple[int, ...], int]:
        """How many process groups of those ranks have had a hashed name."""
        global _hashed_group_counts
        return _hashed_group_counts
''',
    ),
    _reset("if _TORCHCOMM_AVAILABLE:"),
    _reset("pg.abort()"),
    either(
        Hook(
            GROUPS,
            """    # In case there is already a PG with the same rank composition
    unique_str = "_".join([rank_join, str(len(_world.pg_names))])
""",
            COUNTED,
        ),
        Hook(
            GROUPS,
            """    # Disambiguate multiple PGs with the same rank composition. The salt MUST be
    # identical across all ranks that create this group, otherwise ranks compute
    # different group names for the same group. Backends that use the group name
    # as a rendezvous store prefix (e.g. Gloo split's connectFullMesh) then key
    # off different prefixes and deadlock. len(_world.pg_names) is NOT safe here:
    # it diverges across ranks after an earlier asymmetric-membership new_group()
    # (non-member ranks register fewer PGs). _world.group_count is incremented by
    # _process_group_name() on every rank that reaches it (before the member
    # check), so it stays consistent and monotonic across ranks.
    unique_str = "_".join([rank_join, str(_world.group_count)])
""",
            """    # Disambiguate multiple PGs with the same rank composition. The salt MUST be
    # identical across all ranks that create this group, otherwise ranks compute
    # different group names for the same group. Backends that use the group name
    # as a rendezvous store prefix (e.g. Gloo split's connectFullMesh) then key
    # off different prefixes and deadlock. Neither len(_world.pg_names) nor
    # _world.group_count is safe here: members may have made other groups, by local
    # synchronization or by splitting, that not all of them are in.
"""
            + COUNTED,
        ),
    ),
    either(
        Hook(
            GROUPS,
            """        _world.group_count += 1
    # TODO: why is group count incremented only in the else path?
    return pg_name
""",
            BY_ALL,
        ),
        Hook(
            GROUPS,
            """    # Increment on BOTH paths so group_count advances once per group-creation
    # call on every rank that reaches here. This keeps it a collective-consistent,
    # monotonic counter usable as the uniqueness salt in _hash_ranks_to_str
    # (see the comment there). Names need only be unique, not contiguous, so the
    # hashed path consuming counter values is harmless for the non-hashed names.
    _world.group_count += 1
    return pg_name
""",
            BY_ALL,
        ),
    ),
    Hook(GROUPS, MY_RANKS, ""),
    Hook(
        GROUPS,
        "    group_name = _process_group_name(my_group, use_hashed_name=True)\n",
        MY_RANKS
        + """    group_name = _process_group_name(
        global_ranks_in_my_group, use_hashed_name=True
    )
""",
    ),
    either(
        Hook(THREADS, _world(""), _world(STATE)),
        behind(
            THREADS,
            "    comms: list = field(default_factory=list)\n",
            f"    {STATE} = field(default_factory=dict)\n",
        ),
    ),
    behind(
        THREADS,
        "        self._get_world().group_count = value\n",
        """
    @property
    def hashed_group_counts(self):
        return self._get_world().hashed_group_counts
""",
    ),
)

PATCH = Patch(name="group-names", message=MESSAGE, files={TEST: test}, hooks=HOOKS)
