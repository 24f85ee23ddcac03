"""Option types of the scripts. Imports only the standard library, so that parsing is fast."""

from __future__ import annotations

import argparse
import math
import reprlib
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and keeps the line breaks of the module's docstring."""


def number(kind: type[int] | type[float], least: float, most: float) -> Callable[[str], float]:
    """Type of an option: an int or a float from `least` to `most`."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            name = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(
                f"must be {name} from {least} to {most}, got {reprlib.repr(text)}"
            )
        return value

    return parse


def writable_folder(text: str) -> Path:
    """Type of an option: a folder to write to, created if missing."""
    folder = Path(text)
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"must be a folder that can be written, got {text!r}: {error.strerror}"
        ) from None
    return folder


def writable_file(text: str) -> Path:
    """Type of an option: a file to write, in a folder created if missing."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file, got the folder {text!r}")
    return writable_folder(str(path.parent)) / path.name


def package_file(text: str) -> Path:
    """Type of an option: a file to write that ends in .pt2, as PyTorch requires."""
    path = Path(text)
    if path.suffix != ".pt2":
        raise argparse.ArgumentTypeError(f"must be a file that ends in .pt2, got {text!r}")
    return writable_file(text)


def end_on_ctrl_c() -> None:
    """Exit immediately on Ctrl-C, without a traceback, with the exit status of SIGINT."""
    signal.signal(signal.SIGINT, lambda number, _frame: sys.exit(128 + number))
