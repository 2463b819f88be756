"""The page of a profile on screens of two widths, as a browser lays it out. Without chromium these
tests are skipped, and say so.
"""

import json
import shutil
import subprocess

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import cute_sharding

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium to lay the page out")

LOOK = """
const frame = document.querySelector("iframe");
frame.onload = () => {
  const page = frame.contentDocument, width = frame.clientWidth;
  const head = [...page.querySelectorAll("th")].find(each => each.textContent === "received");
  const box = page.querySelector(".scroll");
  document.querySelector("pre").textContent = JSON.stringify({
    "page": page.documentElement.scrollWidth - width,
    "received": head.getBoundingClientRect().right - width,
    "table": box.scrollWidth - box.clientWidth});
};
frame.srcdoc = PAGE;
"""


def laid_out(page, width, folder):
    """Pixels by which the page, its column of bytes and its table are too wide."""
    look = LOOK.replace("PAGE", json.dumps(page).replace("</", "<\\/"))
    (folder / "look.html").write_text(
        f'<pre></pre><iframe style="width:{width}px;height:900px;border:0"></iframe>'
        f"<script>{look}</script>"
    )
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--window-size=1400,1000", "--virtual-time-budget=5000"]
    done = subprocess.run(
        [*command, f"file://{folder / 'look.html'}"], capture_output=True, text=True, timeout=100
    )
    return json.loads(done.stdout.partition("<pre>")[2].partition("</pre>")[0])


@pytest.mark.parametrize("width", [390, 1280])
def test_what_decides_is_on_the_screen_and_can_be_read(width, tmp_path):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    x = DTensor.from_local(torch.ones(2, 6), mesh, [Shard(0)]).requires_grad_()
    with cute_sharding.profile() as p:
        x[1:5].redistribute(placements=[Replicate()]).sum().full_tensor().backward()
    found = laid_out(p.html(), width, tmp_path)
    assert found["page"] <= 0 and found["received"] < 0, found
    assert width < 1000 or found["table"] <= 0, found
