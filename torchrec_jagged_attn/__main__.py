"""``python -m torchrec_jagged_attn``: versions, devices, and the kernel variants of each op."""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import sys
from importlib.util import find_spec

import torch
import triton
from triton import knobs

import torchrec_jagged_attn
from torchrec_jagged_attn import ops
from torchrec_jagged_attn.base.devices import implementation
from torchrec_jagged_attn.ops.dispatch import table
from torchrec_jagged_attn.ops.extension import summary
from torchrec_jagged_attn.ops.flash_attention import extension
from torchrec_jagged_attn.ops.flash_attention import plan as flash_plan
from torchrec_jagged_attn.ops.interaction import plan as interaction_plan
from torchrec_jagged_attn.ops.target_attention import plan as target_plan

VARIANTS = interaction_plan.VARIANTS | {
    "jagged_flash_attention": flash_plan.VARIANTS,
    "jagged_target_attention": target_plan.VARIANTS,
}


def versions() -> list[tuple[str, str]]:
    """Return names and versions of this package and its dependencies."""
    rows = [
        ("torchrec_jagged_attn", torchrec_jagged_attn.__version__),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("CUDA of torch", torch.version.cuda or "none"),
        ("triton", triton.__version__),
    ]
    for name in ("torchrec", "fbgemm_gpu"):
        if find_spec(name) is None:
            rows.append((name, "not installed"))
            continue
        try:
            version = str(getattr(importlib.import_module(name), "__version__", "unknown"))
        except Exception as error:  # builds for another PyTorch raise various errors
            version = f"does not load: {type(error).__name__}: {error}".splitlines()[0]
        rows.append((name, version))
    return rows


def devices() -> list[tuple[torch.device, str]]:
    """Return the devices of this machine, and descriptions of them."""
    rows = [(torch.device("cpu"), f"{platform.machine()}, {torch.get_num_threads()} threads")]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        description = f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
        rows.append((torch.device("cuda", index), description))
    return rows


def variants() -> list[tuple[str, str, str, str]]:
    """Return the kernel variants of every public op on every device.

    A row has the op, the device, the variant, and the calls that it supports.
    """
    names = [name for name in ops.__all__ if name.islower()]  # other names are classes
    return [
        (name, str(device), *variant)
        for name in names
        for device, _ in devices()
        for variant in variants_of(name, device)
    ]


def variants_of(name: str, device: torch.device) -> list[tuple[str, str]]:
    """Return the kernel variants of an op on a device, and descriptions of supported calls."""
    variant, reason = implementation(device)
    if variant == "triton" and name in VARIANTS:
        return list(table(VARIANTS[name], device).items())
    if variant == "reference" and name.endswith("_attention"):
        return [cpu_variant()]
    return [(variant, reason)]


def cpu_variant() -> tuple[str, str]:
    """Return the implementation of attention on a CPU, and the reason for it."""
    try:
        extension.build()
    except Exception as error:
        return "none", f"no C++: {summary(error)}"
    return "c++", "CPU device"


def print_table(rows: list[tuple[str, ...]]) -> None:
    """Print ``rows`` in aligned columns. The first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    print()


def build() -> int:
    """Build the C++ library of attention on a CPU and print its path. Returns the exit code."""
    try:
        print(extension.build())
    except Exception as error:
        print(*filter(None, (error, error.__cause__)), sep="\n", file=sys.stderr)
        return 1
    return 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the options in ``argv``."""
    parser = argparse.ArgumentParser(
        prog="python -m torchrec_jagged_attn",
        description="Prints versions, devices, and the kernel variants of each op on each device. "
        "Builds the C++ library of attention on a CPU first, if necessary.",
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--json", action="store_true", help="print the three tables as one JSON object"
    )
    group.add_argument(
        "--build",
        action="store_true",
        help="only build the C++ library of attention on a CPU and print its path; if that fails, "
        "print the compiler's output and exit with 1",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Print the three tables, or build the C++ library. Returns the exit code."""
    args = parse_args(argv)
    if args.build:
        return build()
    packages = [*versions(), ("TRITON_INTERPRET", "on" if knobs.runtime.interpret else "off")]
    descriptions = [(str(device), description) for device, description in devices()]
    if not args.json:
        print_table([("package", "version"), *packages])
        print_table([("device", "description"), *descriptions])
    on_cpu, _ = implementation(torch.device("cpu"))
    if on_cpu == "reference" and not extension.is_built():
        print("Building the C++ library for CPUs, about 15 s …", file=sys.stderr, flush=True)
    columns = ("op", "device", "variant", "description")
    if args.json:
        rows = [dict(zip(columns, row, strict=True)) for row in variants()]
        tables = {"packages": dict(packages), "devices": dict(descriptions), "ops": rows}
        print(json.dumps(tables, indent=2))
    else:
        print_table([columns, *variants()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
