"""Whatever a program imports first, and whatever it uses first, it runs with each flag as it does
without. Each program in a process of its own.
"""

import json
import subprocess
import sys

import pytest
from imports import IMPORTS, OPTIONS, PROGRAMS
from processes import environment

from cute_sharding._settings import TABLE

# The parts that are switched on by themselves.
PARTS = [setting.flag for setting in TABLE.values() if setting.in_everything]
PATIENCE = 300  # seconds, on a machine that has other work

# Where the program has imported DTensor, however, the flag has done its work.
CHECK = """
import sys
if __name__ == '__main__' and 'torch.distributed.tensor' in sys.modules:
    import cute_sharding
    assert cute_sharding.is_enabled(), 'not switched on'
"""

# Every import of torch begins with `import torch` itself: so once that is done, a fork is as good
# as a new process, and seconds faster. Two at a time.
FORKS = """
import json, os, sys, torch, traceback
programs, running, failed = json.load(open(sys.argv[1])), {}, {}

def wait():
    child, status = os.wait()
    name = running.pop(child)
    if os.waitstatus_to_exitcode(status):
        failed[name] = os.waitstatus_to_exitcode(status)

for name, program in programs.items():
    if len(running) == 2:
        wait()
    child = os.fork()
    if child == 0:
        try:
            exec(compile(program, name, 'exec'), {'__name__': '__main__'})
            os._exit(0)
        except BaseException:
            print(name, traceback.format_exc(), file=sys.stderr, flush=True)
            os._exit(1)
    running[child] = name
while running:
    wait()
print(json.dumps(list(failed)))
"""


def start(arguments, site, stdin=None, **flags):
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment(site, **flags),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        input=stdin,
    )


def run(arguments, site, stdin=None, **flags):
    result = start(arguments, site, stdin, **flags)
    assert result.returncode == 0, result.stderr[-6000:]
    assert "cute_sharding is" not in result.stderr, result.stderr[-6000:]
    return result


@pytest.mark.costly
@pytest.mark.parametrize("flag", PARTS)
def test_first_imports(flag, some_of, site, tmp_path):
    programs = {name: f"import {name}" + CHECK for name in some_of(IMPORTS, 16)}
    failed, errors = forked(programs, site, tmp_path, **{flag: "1"})
    assert not failed, errors


@pytest.mark.costly
@pytest.mark.parametrize("flag", PARTS)
def test_first_uses(flag, some_of, site, tmp_path):
    names = some_of([name for name, text in PROGRAMS.items() if "__main__" not in text], 16)
    programs = {name: PROGRAMS[name] + CHECK for name in names}
    failed, errors = forked(programs, site, tmp_path, **{flag: "1"})
    for name in failed:
        assert_fails_so_without(PROGRAMS[name], site, tmp_path, errors)


@pytest.mark.costly
@pytest.mark.parametrize("flag", PARTS)
@pytest.mark.parametrize(
    "name", [name for name, program in PROGRAMS.items() if "__main__" in program]
)
def test_first_uses_by_files(name, flag, site, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAMS[name] + CHECK)
    run([str(program)], site, **{flag: "1"})


def forked(programs, site, folder, **flags):
    """The names of those that fail, and what was written to stderr."""
    listed = folder / "programs.json"
    listed.write_text(json.dumps(programs))
    result = run(["-c", FORKS, str(listed)], site, **flags)
    return json.loads(result.stdout.splitlines()[-1]), result.stderr


def assert_fails_so_without(program, site, folder, errors):
    """Newer torches refuse to be reloaded."""
    plain = folder / "plain.py"
    plain.write_text(program)
    without = start([str(plain)], site)
    assert without.returncode and without.stderr.splitlines()[-1] in errors, errors[-6000:]


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_the_interpreter(name, site):
    options, code = OPTIONS[name]
    run([*options, "-c", code + CHECK], site, USE_CUTE_SHARDING="1")


def test_an_interactive_session(site):
    lines = [
        "import torch",
        "import torch._dynamo",
        "import cute_sharding",
        "print('on', cute_sharding.is_enabled(), flush=True)",
        "",
    ]
    assert "on True" in run(["-i", "-q"], site, "\n".join(lines), USE_CUTE_SHARDING="1").stdout
