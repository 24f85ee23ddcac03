"""Processes that are forked from one process, which imported PyTorch or TorchRec once."""

import contextlib
import functools
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from unittest import mock

import torch
import torch.multiprocessing as mp


def start_method() -> str:
    """The start method of processes: a process that may have initialized CUDA must not fork.

    A function, because ``is_available`` initializes CUDA.
    """
    return "spawn" if torch.cuda.is_available() else "forkserver"


def fork_server() -> None:
    """Fork this process, which has imported all that tests do, as the server of "forkserver"."""
    before = os.listdir("/dev/fd")

    def fork(path: str, arguments: list[str], passed: list[int]) -> int:
        if (pid := os.fork()) != 0:
            return pid
        for descriptor in {*os.listdir("/dev/fd")}.difference(before, map(str, passed)):
            with contextlib.suppress(OSError):  # of the listing itself
                os.close(int(descriptor))
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        forkserver._forkserver.__init__()  # its lock is held
        try:
            with contextlib.suppress(SystemExit):  # at its end
                exec(arguments[-1])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    resource_tracker.ensure_running()
    mp.set_forkserver_preload([])
    with mock.patch.object(util, "spawnv_passfds", fork):
        forkserver.ensure_running()


@contextlib.contextmanager
def started_script(
    script: Path, *options: str, env: dict[str, str]
) -> Iterator[tuple[mp.Process, Path, Path]]:
    """A process that runs ``script`` in a new session, and its output files."""
    with tempfile.TemporaryDirectory() as folder:
        printed = [Path(folder, name) for name in ("stdout", "stderr")]
        for path in printed:
            path.touch()
        process = mp.get_context(start_method()).Process(
            target=_run_script, args=(script, options, env, Path.cwd(), printed)
        )
        process.start()
        try:
            yield process, *printed
        finally:
            process.kill()
            process.join()


def run_script(script: Path, *options: str, env: dict[str, str]) -> subprocess.CompletedProcess:
    """Run ``script`` with this Python, like ``subprocess.run``."""
    with started_script(script, *options, env=env) as (process, *printed):
        process.join(timeout=120)
        texts = [path.read_text() for path in printed]
    return subprocess.CompletedProcess([script, *options], process.exitcode, *texts)


def _run_script(
    script: Path, options: Sequence[str], env: dict[str, str], cwd: Path, printed: list[Path]
) -> None:
    os.setsid()
    for descriptor, path in enumerate(printed, start=1):
        os.dup2(os.open(path, os.O_WRONLY), descriptor)
    gc.freeze()  # imported modules
    mp.set_start_method(None, force=True)  # not ours: the system's
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    sys.argv = [str(script), *options]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def variables_of_ranks(ranks: int) -> list[dict[str, str]]:
    """The variables that torchrun sets for the processes of one host."""
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        port = any_port.getsockname()[1]
    group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{**group, "RANK": rank, "LOCAL_RANK": rank} for rank in map(str, range(ranks))]


# Reads a program, its arguments, environment and output files from each line; runs the program in a
# forked process, and writes its exit code.
FORKS_ON_REQUEST = """
import gc, importlib, json, os, sys
importlib.import_module(sys.argv.pop())
gc.freeze()
for line in sys.stdin:
    code, argv, env, printed = json.loads(line)
    if (child := os.fork()) == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
for descriptor, path in enumerate(printed, start=1):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
os.environ.clear()
os.environ.update(env)
sys.argv[1:] = argv
exec(code)
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)  # to clear up all that is imported takes a second
"""


@functools.cache
def _forking(imported: str) -> subprocess.Popen:
    command = [sys.executable, "-c", FORKS_ON_REQUEST, imported]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
    )


def run_code(
    *lines: str,
    argv: tuple[str, ...] = (),
    check: bool = True,
    imported: str = "torch",
    **environment: str,
) -> subprocess.CompletedProcess:
    """Run code like ``python -c`` in a new process that imported PyTorch or ``imported``."""
    forking = _forking(imported)
    with tempfile.TemporaryDirectory() as folder:
        printed = [str(Path(folder, name)) for name in ("stdout", "stderr")]
        request = "\n".join(lines), argv, {**os.environ, **environment}, printed
        print(json.dumps(request), file=forking.stdin, flush=True)
        code = int(forking.stdout.readline())
        texts = [Path(path).read_text() for path in printed]
    done = subprocess.CompletedProcess([*lines, *argv], code, *texts)
    assert code == 0 or not check, done.stderr
    return done


def write_script(path: Path, *lines: str) -> None:
    """An executable shell script."""
    path.write_text("\n".join(("#!/bin/sh", *lines)))
    path.chmod(0o755)


def run_package(
    *argv: str,
    check: bool = True,
    absent: tuple[str, ...] = (),
    imported: str = "torch",
    **environment: str,
) -> subprocess.CompletedProcess:
    """Run ``python -m torchrec_jagged_attn`` as if packages ``absent`` were not installed."""
    lines = (
        "import runpy, sys",
        f"sys.modules.update(dict.fromkeys({absent}))",
        "runpy.run_module('torchrec_jagged_attn', run_name='__main__', alter_sys=True)",
    )
    return run_code(*lines, argv=argv, check=check, imported=imported, **environment)
