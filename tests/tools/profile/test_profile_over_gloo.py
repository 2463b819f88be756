"""What is recorded over gloo is what CommDebugMode counts and what the backend is handed."""

import profile_worker
import pytest
from gloo import spawn


@pytest.mark.costly
def test_lines_agree_with_comm_debug_mode_and_with_the_backend(tmp_path):
    jobs = [("transformer", False), ("transformer", True), ("programs", range(12))]
    spawn(profile_worker.start, 4, 4, str(tmp_path / "rendezvous"), "recording_gloo", *jobs)


@pytest.mark.costly
def test_calls_of_torch_distributed_and_messages_are_seen(tmp_path):
    jobs = [("direct",), ("between_meshes",)]
    spawn(profile_worker.start, 4, 4, str(tmp_path / "rendezvous"), "gloo", *jobs)
