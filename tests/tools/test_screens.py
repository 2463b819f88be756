"""Pages on screens of two widths, light and dark, as a browser lays them out. Without chromium
these tests are skipped, and say so.
"""

import json
import shutil
import subprocess
from functools import cache

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

import cute_sharding
from cute_sharding import StepPlan
from cute_sharding.programs.plan import PlannedOp, Totals
from cute_sharding.tools.estimate import Estimate
from cute_sharding.tools.estimate.values import KINDS, DryRun, Memory, Traffic
from cute_sharding.tools.profile.values import Collective, Place

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium to lay the page out")

# For each text the pixels by which the smallest element that has it is too wide for the screen.
LOOK = """
const frame = document.querySelector("iframe");
frame.onload = () => {
  const page = frame.contentDocument, width = frame.clientWidth;
  const every = [...page.body.querySelectorAll("*")].filter(each => each.clientWidth);
  const over = {};
  for (const text of TEXTS) {
    const found = every.filter(each => each.textContent.includes(text)).pop();
    over[text] = found ? found.getBoundingClientRect().right - width : "missing";
  }
  document.querySelector("pre").textContent = JSON.stringify({
    "page": page.documentElement.scrollWidth - width, "over": over,
    "ink": getComputedStyle(page.body).color});
};
frame.srcdoc = PAGE;
"""


def laid_out(page, texts, width, scheme, folder):
    look = LOOK.replace("TEXTS", json.dumps(texts))
    look = look.replace("PAGE", json.dumps(page).replace("</", "<\\/"))
    (folder / "look.html").write_text(
        f'<pre></pre><iframe style="width:{width}px;height:900px;border:0"></iframe>'
        f"<script>{look}</script>"
    )
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--window-size=1400,1000", "--virtual-time-budget=5000"]
    command += [f"--blink-settings=preferredColorScheme={scheme}"]
    done = subprocess.run(
        [*command, f"file://{folder / 'look.html'}"], capture_output=True, text=True, timeout=100
    )
    return json.loads(done.stdout.partition("<pre>")[2].partition("</pre>")[0])


def of_profile():
    """The page of a profile, and what decides on it."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    x = DTensor.from_local(torch.ones(2, 6), mesh, [Shard(0)]).requires_grad_()
    line = "a_model_of_ours_with_a_long_name.py:107"
    reads = ("[R, S(0), S(1), S(2)]",)
    op = PlannedOp("aten.mm.default", (0,), {}, (1,), reads, (True,), (None,), line)
    totals = {"op by op": Totals(7_000_000, 9), "planned": Totals(721_000, 1)}
    alone = {line: Totals(4_200_000, 3)}
    plan = StepPlan("a.py:step", (4,), None, (), (), (op,), totals, alone=alone)
    with cute_sharding.profile(plan=plan) as p:
        x[1:5].redistribute(placements=[Replicate()]).sum().full_tensor().backward()
    texts = ["144 B in 1 collective", "When collectives ran", "test_screens.py:"]
    return p.html(), [*texts, line, "saves 4.2 MB (60 %) and 3 collectives", "all-gather"]


def of_estimate():
    """The page of an estimate with many columns."""
    group = (0, 1, 2, 3)
    lines = [Place("a_model_of_ours_with_a_long_name.py", n, "Attention.forward") for n in (7, 8)]
    sent = [
        Collective("all-gather", "", group, "float32", 4, n, n, n, line)
        for n, line in zip((10**9, 10**8), lines)
    ]
    held = {(kind, "layers.0"): 10**9 for kind in KINDS}
    runs = [
        DryRun(name, Traffic.of(sent, (4,)), Traffic({}), Memory.of({(False, "layers.0"): held}))
        for name in ("PyTorch", "views", "redistribution", "movement", "all")
    ]
    found = Estimate("train.py:step", (4,), ("tp",), 0, "cuda", None, None, tuple(runs))
    return found.html(), ["4.4 GB", "redistribution", "all: 4 GB in 1", "all: 4 GB", str(lines[0])]


def of_overlap():
    graph = make_fx(lambda x: (x @ x).sin(), tracing_mode="fake")(torch.ones(64, 64))
    return cute_sharding.overlap(graph).html(), ["Simulated on", "before the compiler", "communic"]


MADE = {made.__name__: cache(made) for made in (of_profile, of_estimate, of_overlap)}


@pytest.mark.parametrize(("scheme", "ink"), [(1, "rgb(0, 0, 0)"), (0, "rgb(255, 255, 255)")])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("made", MADE)
def test_what_decides_is_on_the_screen_and_can_be_read(made, width, scheme, ink, tmp_path):
    page, texts = MADE[made]()
    found = laid_out(page, texts, width, scheme, tmp_path)
    assert found["page"] <= 0 and found["ink"] == ink, found
    assert all(over != "missing" and over <= 0 for over in found["over"].values()), found
