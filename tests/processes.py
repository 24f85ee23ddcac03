"""Processes that need not import PyTorch and TorchRec: the one that forks them did, once."""

import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.multiprocessing as mp

# One that may have opened CUDA must not fork.
START_METHOD = "spawn" if torch.cuda.is_available() else "forkserver"
mp.set_forkserver_preload(["matplotlib.pyplot", "tests.torchrec.two_ranks", "torchmetrics"])


def run_script(
    script: Path, *options: str, env: dict[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess:
    """As ``subprocess.run`` with this Python."""
    with tempfile.TemporaryDirectory() as folder:
        printed = [Path(folder, name) for name in ("stdout", "stderr")]
        process = mp.get_context(START_METHOD).Process(
            target=_run_script, args=(script, options, env, cwd or Path.cwd(), printed)
        )
        process.start()
        process.join(timeout=120)
        process.kill()
        process.join()
        texts = [path.read_text() for path in printed]
    return subprocess.CompletedProcess([script, *options], process.exitcode, *texts)


def _run_script(
    script: Path, options: list[str], env: dict[str, str], cwd: Path, printed: list[Path]
) -> None:
    for descriptor, path in enumerate(printed, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    sys.argv = [str(script), *options]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
