"""What tables are, and what those of ops show, for ``tables.py``: files, rows and columns."""

from dataclasses import dataclass, field, replace

from suites._cases import TRAINING_CASES


@dataclass(frozen=True)
class Cell:
    """A figure of a provider: its mode, metric and unit as ``run.py`` writes them.

    Args:
        provider: with ``{}`` for what a row says.
        unit: that of the CSV; or ``µs``, of what is there in ``ms``.
        named: whether the provider is named, of a group of providers of which this is the best.
    """

    provider: str
    mode: str = "both"
    metric: str = "graph_time"
    unit: str = "ms"
    named: bool = False

    def in_units_of_csv(self) -> "Cell":
        """The figure to look for."""
        return replace(self, unit="ms") if self.unit == "µs" else self


@dataclass(frozen=True)
class Column:
    """A column: its head, and how its cells look.

    Args:
        head: with ``{batch}`` for the samples of a step of its case, and ``{gpu}`` for what that
            was measured on, where other cases were measured on something else.
        template: with a ``{}`` for each of ``cells``. Of ``{} ms, {} ×``, a part that has no figure
            is left out.
        case: the case of a row, with ``{}`` for what the row says.
    """

    head: str
    template: str
    cells: tuple[Cell, ...]
    case: str = "{}"


@dataclass(frozen=True)
class Table:
    """A table.

    Args:
        results: the files that it is made from, without ``.csv``.
        heads: of the columns that label a row, ``|`` between them.
        rows: from a label to the case, or to what the columns put into their case.
        ours: the provider that ratios are to.
        names: of providers, in words.
    """

    results: tuple[str, ...]
    heads: str
    rows: dict[str, str]
    columns: tuple[Column, ...]
    ours: str = "ours"
    names: dict[str, str] = field(default_factory=dict)


PEERS = {
    "linear+torch-varlen": "FlashAttention-2",
    "linear+flash-attention-3": "FlashAttention-3",
    "linear+fbgemm-chain": "FBGEMM",
    "linear+fbgemm-sll": "FBGEMM, SLL",
    "linear+padded-sdpa": "padded SDPA",
}
SHAPE = "samples × targets, heads, width; rows"
OPS = (
    *("jagged_dense_bmm", "jagged_jagged_bmm", "jagged_softmax"),
    *("jagged_jagged_bmm_jagged_out", "array_jagged_bmm_jagged_out", "jagged2_softmax"),
)
RANKING = [name for name, case in TRAINING_CASES.items() if case.large]


def both(head: str, provider: str, metric: str = "graph_time", unit: str = "ms") -> Column:
    """Forward, and forward and backward."""
    cells = (Cell(provider, "forward", metric, unit), Cell(provider, "both", metric, unit))
    return Column(head, "{} / {}", cells)


def one(head: str, provider: str, mode: str = "both", unit: str = "ms", **more: str) -> Column:
    """One figure."""
    case = more.pop("case", "{}")
    return Column(head, "{}", (Cell(provider, mode, unit=unit, **more),), case)


def shapes(names: list[str]) -> dict[str, str]:
    """Rows of target attention: what they are, from their cases."""
    labels = {}
    for name in names:
        case = TRAINING_CASES[name]
        of_rows = f"{case.lengths} up to {case.max_length:,}"
        shape = f"{case.batch_size:,} × {case.num_targets}, {case.num_heads}, {case.width}"
        dtype = {"bfloat16": "bf16", "float32": "fp32"}[str(case.dtype).removeprefix("torch.")]
        labels[f"{shape}; {of_rows} | {dtype}"] = name
    return labels


def ops(size: str) -> dict[str, str]:
    """Rows of the ops of feature interaction, in one of the sizes."""
    return {f"`{op}`": f"{op}-{size}" for op in OPS}


def self_attention(*rows: tuple[str, str, str]) -> dict[str, str]:
    """Rows of self-attention: lengths, shape, case."""
    return {f"{lengths} | {shape}": case for lengths, shape, case in rows}


def table1(tf32: bool) -> Table:
    """The paper's shape."""
    columns = []
    for mode, what in (("forward", "forward"), ("both", "both")):
        if not tf32:
            columns.append(one(f"{what}, µs", "ours", mode, "µs"))
        columns.append(one(f"{what}, to padded", "padded", mode, "× ours"))
        columns.append(one(f"{what}, to FBGEMM", "fbgemm", mode, "× ours"))
        if tf32:
            columns.append(one(f"{what}, of the floor", "ours", mode, "of floor"))
        elif mode == "forward":
            of_paper = one(
                "the paper, to padded", "paper", mode, "padded over jagged", metric="time"
            )
            columns.insert(2, of_paper)
    results = ("table1_tf32",) if tf32 else ("table1", "paper")
    return Table(results, "op", ops("paper"), tuple(columns))


HOST_COLUMNS = (
    ("forward", "forward", "host_time"),
    ("forward and backward", "both", "host_time"),
    ("the same in one thread", "both", "host_time_one_thread"),
)


OP_TABLES = {
    "target_attention_summary": Table(
        ("target_attention",),
        SHAPE,
        {
            label.removesuffix(" | bf16"): name
            for label, name in shapes(RANKING).items()
            if label.endswith("bf16") and name != "rank-8k-16-targets"
        },
        tuple(
            Column(
                head,
                form.format("{} ms, {} MiB"),
                (Cell(provider), Cell(provider, metric="peak_memory", unit="MiB")),
            )
            for head, form, provider in (
                ("ours", "**{}**", "ours"),
                ("FlashAttention-2", "{}", "linear+torch-varlen"),
                ("padded", "{}", "linear+padded-sdpa"),
            )
        ),
    ),
    "serving_load": Table(
        ("serving_load",),
        "requests/s",
        {f"{rate:,}": f"{rate}/s" for rate in (100, 400, 800, 2000)},
        tuple(
            Column(
                head,
                "{} / {}; {}",
                (
                    Cell(form, "forward", "p50", "ms"),
                    Cell(form, "forward", "p99", "ms"),
                    Cell(form, "forward", "served", "requests/s"),
                ),
            )
            for head, form in (
                ("as trained", "as trained"),
                ("int8 tables, compiled", "compiled"),
            )
        ),
    ),
    "target_attention_kernel": Table(
        ("target_attention_kernel",),
        f"{SHAPE} | dtype",
        shapes([*RANKING[:5], "rank-1k-fp32", "rank-200-fp32"]),
        (
            *(
                Column(
                    f"{head}, of the floor",
                    "{}, {}",
                    (
                        Cell("ours-kernel", mode, unit="µs"),
                        Cell("ours-kernel", mode, unit="of floor"),
                    ),
                )
                for head, mode in (("forward", "forward"), ("forward+backward", "both"))
            ),
            both("to FlashAttention-2, on ready keys and values", "torch-varlen", unit="× ours"),
        ),
        ours="ours-kernel",
    ),
    "target_attention_rows": Table(
        ("target_attention_rows",),
        f"{SHAPE} | dtype | places of a row",
        {
            f"{label} | {places}": f"{name}-x{places}"
            for label, name in shapes(["rank-1k", "rank-2k", "rank-200", "rank-1k-fp32"]).items()
            for places in (1, 4, 16, 64)
        },
        (
            both("by index, µs", "ours-by-index", unit="µs"),
            both("to a copy made before", "ours-copied-before", unit="× ours"),
            both("to a copy made in the call", "ours-on-a-copy", unit="× ours"),
            both("MiB, by index", "ours-by-index", metric="peak_memory", unit="MiB"),
            both("MiB, on a copy", "ours-on-a-copy", metric="peak_memory", unit="MiB"),
        ),
        ours="ours-by-index",
    ),
    "target_attention": Table(
        ("target_attention",),
        f"{SHAPE} | dtype",
        shapes(RANKING),
        (
            one("ours, ms", "ours"),
            Column("to the best peer", "{}", (Cell("best-peer", unit="× ours", named=True),)),
            one("to padded SDPA", "linear+padded-sdpa", unit="× ours"),
            one("eager, to the best peer", "best-peer", unit="× ours", metric="time"),
            Column(
                "MiB, ours and FlashAttention-2",
                "{}, {}",
                (
                    Cell("ours", metric="peak_memory", unit="MiB"),
                    Cell("linear+torch-varlen", metric="peak_memory", unit="MiB"),
                ),
            ),
        ),
        names=PEERS,
    ),
    "target_attention_recency": Table(
        ("target_attention_recency",),
        f"{SHAPE} | dtype",
        shapes(RANKING),
        (one("with the bias by position, ms", "ours+recency"),),
    ),
    "target_attention_scores": Table(
        ("target_attention_scores",),
        f"{SHAPE} | dtype",
        shapes(RANKING),
        tuple(
            replace(both(f"{name}, {what}", provider, unit=unit), case=f"{{}}-{name.lower()}")
            for what, provider, unit, names in (
                ("µs", "ours", "µs", ("softmax", "SiLU", "sigmoid")),
                ("of the floor", "ours", "of floor", ("SiLU", "sigmoid")),
                ("padded, to ours", "padded", "× ours", ("SiLU", "sigmoid")),
            )
            for name in names
        ),
    ),
    "semantic_ids": Table(
        ("semantic_ids",),
        f"{SHAPE} | dtype",
        {
            "10,000 × 1, 1, 128; 512 each | bf16": "full-512",
            "10,000 × 1, 4, 128; 512 each | bf16": "full-512-4-heads",
            "4,096 × 1, 4, 128; log-normal up to 1,024 | bf16": "rank-1k",
            "4,096 × 16, 1, 128; log-normal up to 1,024 | bf16": "rank-1k-16-targets",
            "4,096 × 1, 4, 128; log-normal up to 1,024 | fp32": "rank-1k-fp32",
            "1 × 1, 4, 128; 100,000 | bf16": "one-user",
        },
        (
            both("digits, µs", "ours-codes", unit="µs"),
            both("of the floor", "ours-codes", unit="of floor"),
            both("decoded in each call, to digits", "ours-decoded", unit="× ours"),
            both("rows in memory, to digits", "ours-rows", unit="× ours"),
        ),
        ours="ours-codes",
    ),
    "select_events": Table(
        ("select_events",),
        "users, width; rows; kept",
        {
            f"{shape}, {by}": f"{case}{suffix}"
            for case, shape in {
                "events-200": "4,096, 128; log-normal up to 1,600; 64",
                "events-200-narrow": "4,096, 8; log-normal up to 1,600; 64",
                "events-1250": "512, 128; log-normal up to 10,000; 512",
                "events-10k": "512, 128; up to 10,000, nine tenths full; 2,048",
            }.items()
            for by, suffix in (("by score", ""), ("newest", "-newest"))
        },
        (
            both("ours, µs", "ours", unit="µs"),
            both("of the floor", "ours", unit="of floor"),
            both("padded top-k, to ours", "padded", unit="× ours"),
            both("one sort, to ours", "sorted", unit="× ours"),
        ),
    ),
    "crossover": Table(
        ("targets", "targets_fp32"),
        "targets",
        {n: n for n in ["4", "8", "12", "16", "24", "32", "48", "64", "128"]},
        tuple(
            one(f"{dtype}, {form}", f"ours-{form}", unit="µs", case=case)
            for dtype, case in (("bf16", "targets-{}"), ("fp32", "targets-fp32-{}"))
            for form in ("absorbed", "explicit")
        ),
    ),
    "serving": Table(
        ("serving",),
        "users × candidates, longest",
        {
            f"{users} × {targets:,}, {length:,}": f"u{users}-t{targets}-l{length}-d128"
            for users, length in ((15, 1024), (15, 10_000), (1, 4096))
            for targets in (1, 4, 16, 64, 256, 1024, 2048)
        },
        tuple(
            one(head, provider, "forward", "µs")
            for head, provider in (
                ("absorbed", "ours-absorbed"),
                ("explicit", "ours-explicit"),
                ("FlashAttention-2", "linear+torch-varlen"),
                ("FlashAttention-3", "linear+flash-attention-3"),
                ("padded", "linear+padded-sdpa"),
                ("copied to each candidate", "linear+expanded-sdpa"),
                ("copied, FlashAttention-3", "linear+expanded-flash-attention-3"),
            )
        ),
    ),
    "requests": Table(
        ("requests",),
        "requests × candidates",
        {f"{8192 // n:,} × {n:,}": f"requests-{n}" for n in (1, 4, 16, 64, 256, 1024, 2048)},
        (
            both("ours, µs", "ours", unit="µs"),
            both("to copies, FlashAttention-3", "linear+expanded-flash-attention-3", unit="× ours"),
            both("to `varlen_attn`, by request", "linear+torch-varlen", unit="× ours"),
            both("to FlashAttention-3, by request", "linear+flash-attention-3", unit="× ours"),
            both("MiB, ours", "ours", metric="peak_memory", unit="MiB"),
            both(
                "MiB, copies",
                "linear+expanded-flash-attention-3",
                metric="peak_memory",
                unit="MiB",
            ),
        ),
    ),
    "ikbo": Table(
        ("ikbo",),
        "query rows of a candidate | longest | lengths",
        {
            f"{rows} | {length:,} | {lengths}": f"{family}-{length}{end}"
            for rows, family in ((64, "ikbo"), (1, "one-row"))
            for length in (512, 1024, 2048, 4096, 8192, 16384)
            for lengths, end in (("all the longest", ""), ("1 to the longest", "-jagged"))
        },
        (
            one("ours, µs", "ours", "forward", "µs"),
            one("of the floor", "ours", "forward", "of floor"),
            *(
                one(f"to {head}", provider, "forward", "× ours")
                for head, provider in (
                    ("IKBO", "ikbo"),
                    ("FlashAttention-3, by user", "flash-attention-3"),
                    ("`varlen_attn`, by user", "torch-varlen"),
                    ("copies, FlashAttention-3", "expanded-flash-attention-3"),
                )
            ),
        ),
    ),
    "serving_one_user": Table(
        ("serving_one_user",),
        "candidates",
        {f"{n:,}": str(n) for n in (64, 128, 256, 1024)},
        tuple(
            Column(
                f"{length:,} rows, absorbed / explicit",
                "{} / {}",
                (
                    Cell("ours-absorbed", "forward", unit="µs"),
                    Cell("ours-explicit", "forward", unit="µs"),
                ),
                f"u1-t{{}}-l{length}-d128",
            )
            for length in (1024, 4096, 10_000)
        ),
    ),
    "skew": Table(
        ("skew",),
        "fill",
        {fill: f"fill-{fill}" for fill in ["0.05", "0.07", "0.16", "0.25", "0.5", "1"]},
        (
            one("forward, µs", "ours-kernel", "forward", "µs"),
            one("forward+backward, µs", "ours-kernel", "both", "µs"),
        ),
    ),
    "giant": Table(
        ("giant",),
        "24,501 samples",
        {"one of 10,000 rows, the others of 20": "giant", "uniform, as many rows": "no-giant"},
        (
            one("forward, µs", "ours-kernel", "forward", "µs"),
            one("forward+backward, µs", "ours-kernel", "both", "µs"),
        ),
    ),
    "self_attention": Table(
        ("self_attention",),
        "lengths | B × H × D",
        self_attention(
            ("uniform 1…32", "8192 × 4 × 64", "self-32"),
            ("uniform 1…64", "4096 × 4 × 64", "self-64"),
            ("uniform 1…256", "512 × 4 × 64", "self-256"),
            ("uniform 1…512", "1024 × 1 × 64", "self-512"),
            ("uniform 1…1024", "512 × 4 × 64", "self-1k"),
            ("uniform 1…2048", "256 × 4 × 128", "self-2k"),
            ("log-normal, ≤ 4096", "256 × 2 × 128", "self-4k"),
        ),
        (
            both("ours, ms", "ours"),
            both("of the floor", "ours", unit="of floor"),
            both("to FlashAttention-3", "flash-attention-3", unit="× ours"),
            both("to FlashAttention-2", "torch-varlen", unit="× ours"),
            both("to FBGEMM `sll_multi_head`", "fbgemm-sll", unit="× ours"),
        ),
    ),
    "self_attention_recency": Table(
        ("self_attention_recency",),
        "lengths | B × H × D",
        self_attention(
            ("uniform 1…256", "512 × 4 × 64", "self-256"),
            ("uniform 1…1024", "512 × 4 × 64", "self-1k"),
        ),
        (
            both("ours, ms", "ours+recency"),
            both("ours, without", "ours-unbiased"),
            both("FlashAttention-2, without", "torch-varlen-unbiased"),
            both("padded PyTorch", "padded"),
        ),
    ),
    "figure2": Table(
        ("figure2", "figure2_skewed"),
        "longest",
        {str(n): f"length-{n}" for n in (64, 128, 256, 512, 1024, 2048, 4096)}
        | {f"skewed, {n}": f"skewed-{n}" for n in (64, 256, 1024, 4096)},
        (
            both("dense over ours", "padded", unit="× ours"),
            both("dense flash over ours", "dense-flash", unit="× ours"),
            both("unfused over ours", "ours-unfused", unit="× ours"),
            both("FlashAttention-3 over ours", "flash-attention-3", unit="× ours"),
            both("dense over ours, memory", "padded", "memory", "× ours"),
            both("less memory than dense flash", "dense-flash", "memory", "saved"),
        ),
    ),
    "host": Table(
        ("host",),
        "64 samples of up to 50 rows",
        {
            "`JaggedTargetAttention`": "target_attention-host",
            "the same, with a bias by recency": "target_attention_recency-host",
            "`jagged_target_attention`": "target_attention_kernel-host",
            "`JaggedSelfAttention`": "self_attention_module-host",
            "`jagged_flash_attention`": "self_attention-host",
            "the same, with a bias by distance": "self_attention_recency-host",
            **ops("host"),
        },
        (
            *(
                one(f"{head}, µs", "ours", mode, "µs", metric=metric)
                for head, mode, metric in HOST_COLUMNS
            ),
            *(
                one(f"best peer, {head}", "best-peer", mode, "× ours", metric=metric)
                for head, mode, metric in HOST_COLUMNS
            ),
        ),
    ),
    "self_attention_window": Table(
        ("self_attention_window",),
        "512 histories of up to 1,023 rows, causal, 4 heads of 64, bf16",
        {
            "all rows": "1k-window-all",
            "a window of 256": "1k-window-256",
            "a window of 64": "1k-window-64",
        },
        tuple(
            one(f"{head}, µs", "ours", mode, "µs")
            for head, mode in (
                ("forward", "forward"),
                ("backward", "backward"),
                ("forward and backward", "both"),
            )
        ),
    ),
    "table1": table1(tf32=False),
    "table1_tf32": table1(tf32=True),
    "table1_memory": Table(
        ("table1", "paper"),
        "op",
        ops("paper"),
        (
            one("forward, to padded", "padded", "forward", "× ours", metric="memory"),
            one(
                "to padding in the call",
                "jagged-padded-jagged",
                "forward",
                "× ours",
                metric="memory",
            ),
            one("the paper", "paper", "forward", "padded over jagged", metric="memory"),
        ),
    ),
    "table1_bf16": Table(
        ("table1",),
        "op",
        {f"`{op}`": op for op in OPS},
        (
            one("1,024 samples: forward, µs", "ours", "forward", "µs", case="{}-bf16"),
            one("to padded", "padded", "forward", "× ours", case="{}-bf16"),
            one("to FBGEMM", "fbgemm", "forward", "× ours", case="{}-bf16"),
            one("both, to padded", "padded", "both", "× ours", case="{}-bf16"),
            one("to FBGEMM", "fbgemm", "both", "× ours", case="{}-bf16"),
            one("4,096 samples: forward, µs", "ours", "forward", "µs", case="{}-large"),
            one("of the floor", "ours", "forward", "of floor", case="{}-large"),
            one("to FBGEMM", "fbgemm", "forward", "× ours", case="{}-large"),
            one("both, of the floor", "ours", "both", "of floor", case="{}-large"),
            one("to FBGEMM", "fbgemm", "both", "× ours", case="{}-large"),
        ),
    ),
    "table1_eager": Table(
        ("table1",),
        "op",
        ops("paper"),
        (
            both("to padded, forward / both", "padded", "time", "× ours"),
            both("to FBGEMM, forward / both", "fbgemm", "time", "× ours"),
            one("ours, both, µs", "ours", "both", "µs", metric="time"),
        ),
    ),
}
