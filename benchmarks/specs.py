"""Definitions of the tables of the documents, for ``report.py``.

A column is a line ``head = template``. A template has queries in braces: a provider and, in any
order, a mode, a metric and a unit (:func:`figures.parse_query`), as in ``{ours forward µs} µs``.
``*`` is replaced by the value of the row, and ``@`` precedes a case other than the value of the
row. ``{ours forward/both}`` is ``{ours forward} / {ours both}``. A head may have ``{batch}``, the
samples per step of its case, and ``{gpu}``, its GPU if cases differ in it.
"""

from dataclasses import dataclass, field, replace

from end_to_end_cases import GPUS, SHARDINGS, step_case
from suites import TRAINING_CASES


@dataclass(frozen=True)
class Table:
    """Definition of a table."""

    heads: str  # heads of the columns that label a row, separated by |
    rows: dict[str, str]  # value that replaces *, by default the case, by label
    columns: str  # a line for each; see above
    ours: str = "ours"  # the provider in the denominator of ratios
    mode: str = "both"  # the default mode
    names: dict[str, str] = field(default_factory=dict)  # displayed names of providers
    results: tuple[str, ...] = ()  # CSV files without .csv; by default the file of its name


STEP_PROVIDERS = {
    "sum": "sum pooling",
    "sum-graph": "sum pooling, CUDA graph",
    "padded": "linear + padded SDPA",
    "padded-din": "padded activation unit",
    "fbgemm-sll": "linear + FBGEMM, SLL",
    "linear-varlen": "linear + FlashAttention-2",
    "ours": "ours",
    "ours-graph": "ours, CUDA graph",
    "encoder-graph": "ours after an encoder layer, CUDA graph",
    "ours-value-projection": "ours, values projected",
    "ours-as-peers": "ours, the function of peers",
    "ours-rows-sent": "ours, rows sent",
    "ours-single-ids": "ours, single ids",
    "ours-index-dedup": "ours, single ids, unique ids sent by TorchRec",
    "ours-by-request": "ours, by request, one lookup",
}
"""Displayed names of the providers of ``end_to_end.py``."""
GRAPH_PROVIDERS = ("sum", "sum-graph", "linear-varlen", "ours", "ours-graph")
"""Providers that are compared with and without a ``TrainPipelineCudaGraph``."""
MEANS = (50, 200, 1000, 4000)
POOLINGS = {
    "mean": "mean",
    "recency": "mean weighted by recency",
    "din": "DIN's activation unit, padded",
    "attention": "attention, the default",
    "encoder": "attention after an encoder layer",
}
"""Displayed names of the poolings of ``quality.py``."""
LOGS = {
    "ml-1m": "MovieLens-1M",
    "ml-1m@300": "MovieLens-1M, 300 users",
    "video_games.txt.gz": "Video Games",
    "synthetic": "synthetic",
    "planted": "synthetic",
}
"""Displayed names of data sets, by file or folder."""
EVENTS = {
    "all": "all",
    "boosted": "all, boosted by relevance",
    "relevance": "by relevance",
    "newest": "the newest",
    "random": "random",
}
"""Displayed names of the selections of ``event_selection.py``."""
EVENT_LOGS = {
    "synthetic": "synthetic",
    "ml-1m": "MovieLens-1M",
    "synthetic-gpu": "synthetic, on a GPU",
}
BUDGETS = {"1": "1", "0.5": "½", "0.25": "¼", "0.125": "⅛"}
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
STEP_ROWS = {label: name for name, label in STEP_PROVIDERS.items()}
HOST = {
    "forward": "forward host_time",
    "forward and backward": "both host_time",
    "the same in one thread": "both host_time_one_thread",
}


def join_lines(*columns: str) -> str:
    """Join columns of a table."""
    return "\n".join(columns)


def shapes(*names: str) -> dict[str, str]:
    """Return rows of target attention, labeled by the shapes of their cases."""
    labels = {}
    for name in names:
        case = TRAINING_CASES[name]
        label = f"{case.batch_size:,} × {case.num_targets}, {case.num_heads}, {case.width}"
        label += f"; {case.lengths} up to {case.max_length:,}"
        words = {"torch.bfloat16": "bf16", "torch.float32": "fp32"}[str(case.dtype)]
        labels[f"{label} | {words}"] = name
    return labels


def ops(size: str) -> dict[str, str]:
    """Return rows of the ops of feature interaction with one of the sizes."""
    return {f"`{op}`": f"{op}-{size}" for op in OPS}


def steps(template: str, suffix: str = "") -> str:
    """Return a column per mean length; ``@`` in ``template`` is replaced by its case."""
    head = "{:,} events, {{batch}} samples{{gpu}} = "
    return join_lines(
        *(head.format(n) + template.replace("@", f"@mean-{n}{suffix}") for n in MEANS)
    )


def by_gpus(template: str) -> Table:
    """Return a table of mean lengths, numbers of GPUs and shardings, with a column per provider."""
    rows = {
        f"{mean:,} | {gpus} | {sharding.replace('_', '-') if gpus > 1 else 'whole'}": case
        for mean in MEANS
        for gpus in GPUS
        for sharding in SHARDINGS
        if gpus > 1 or sharding == SHARDINGS[0]
        for case in [step_case(mean, gpus, sharding)]
    }
    columns = join_lines(
        *(f"{label} = {template}".replace("*", name) for name, label in STEP_PROVIDERS.items())
    )
    return Table(
        "events | GPUs | item table", rows, columns, mode="step", results=("end_to_end_gpus",)
    )


OP_TABLES = {
    "serving_load": Table(
        "requests/s",
        {f"{rate:,}": f"{rate}/s" for rate in (100, 400, 800, 2000)},
        """as trained = {as trained p50} / {as trained p99}; {as trained served}
        int8 tables, compiled = {compiled p50} / {compiled p99}; {compiled served}""",
        mode="forward",
    ),
    "target_attention_kernel": Table(
        f"{SHAPE} | dtype",
        shapes(
            "rank-1k",
            "rank-2k",
            "rank-2k-8-targets",
            "rank-8k-16-targets",
            "rank-200",
            "rank-1k-fp32",
            "rank-200-fp32",
        ),
        """forward, of the roofline = {ours-kernel forward µs}, {ours-kernel forward floor}
        forward+backward, of the roofline = {ours-kernel both µs}, {ours-kernel both floor}
        speedup over FlashAttention-2 = {torch-varlen × forward/both}""",
        ours="ours-kernel",
    ),
    "target_attention": Table(
        f"{SHAPE} | dtype",
        shapes("rank-1k", "rank-2k-8-targets", "rank-1k-fp32"),
        """ours, ms = {ours}
        speedup over the best peer = {best-peer × named}
        speedup over padded SDPA = {linear+padded-sdpa ×}
        MiB: ours = {ours peak_memory}
        FlashAttention-2 = {linear+torch-varlen peak_memory}
        padded SDPA = {linear+padded-sdpa peak_memory}""",
        names=PEERS,
    ),
    "semantic_ids": Table(
        f"{SHAPE} | dtype",
        {
            "10,000 × 1, 1, 128; 512 each | bf16": "full-512",
            "10,000 × 1, 4, 128; 512 each | bf16": "full-512-4-heads",
            "4,096 × 1, 4, 128; log-normal up to 1,024 | bf16": "rank-1k",
        },
        """codes, µs = {ours-codes µs forward/both}
        of the roofline = {ours-codes floor forward/both}
        speedup over decoding in each call = {ours-decoded × forward/both}
        speedup over rows in memory = {ours-rows × forward/both}""",
        ours="ours-codes",
    ),
    "select_events": Table(
        "users, width; rows; kept",
        {
            "4,096, 128; log-normal up to 1,600; 64, by score": "events-200",
            "4,096, 128; log-normal up to 1,600; 64, newest": "events-200-newest",
            "4,096, 8; log-normal up to 1,600; 64, by score": "events-200-narrow",
        },
        """ours, µs = {ours µs forward/both}
        of the roofline = {ours floor forward/both}
        speedup over padded top-k = {padded × forward/both}
        speedup over padded rows by number = {padded-newest × forward/both}
        speedup over one sort = {sorted × forward/both}""",
    ),
    "serving": Table(
        "candidates of a user",
        {f"{n:,}": f"serving-{n}" for n in (1, 16, 256, 2048)},
        """ours, µs = {ours µs}
        speedup over FlashAttention-2 = {linear+torch-varlen ×}
        padded SDPA = {linear+padded-sdpa ×}
        padded SDPA of copies = {linear+expanded-sdpa ×}""",
        mode="forward",
    ),
    "self_attention": Table(
        "lengths | B × H × D",
        {
            "uniform 1…32 | 8192 × 4 × 64": "self-32",
            "uniform 1…64 | 4096 × 4 × 64": "self-64",
            "uniform 1…256 | 512 × 4 × 64": "self-256",
            "uniform 1…512 | 1024 × 1 × 64": "self-512",
            "uniform 1…1024 | 512 × 4 × 64": "self-1k",
            "uniform 1…2048 | 256 × 4 × 128": "self-2k",
            "log-normal, ≤ 4096 | 256 × 2 × 128": "self-4k",
        },
        """ours, ms = {ours forward/both}
        of the roofline = {ours floor forward/both}
        speedup over FlashAttention-3 = {flash-attention-3 × forward/both}
        speedup over FlashAttention-2 = {torch-varlen × forward/both}
        speedup over FBGEMM `sll_multi_head` = {fbgemm-sll × forward/both}""",
    ),
    "self_attention_recency": Table(
        "lengths | B × H × D",
        {
            "uniform 1…256 | 512 × 4 × 64": "self-256",
            "uniform 1…1024 | 512 × 4 × 64": "self-1k",
        },
        """ours, ms = {ours+recency forward/both}
        ours, without = {ours-unbiased forward/both}
        FlashAttention-2, without = {torch-varlen-unbiased forward/both}
        padded PyTorch = {padded forward/both}""",
    ),
    "figure2": Table(
        "longest",
        {str(n): f"length-{n}" for n in (64, 128, 256, 512, 1024, 2048, 4096)}
        | {f"skewed, {n}": f"skewed-{n}" for n in (64, 256, 1024, 4096)},
        """speedup over dense = {padded × forward/both}
        speedup over dense flash = {dense-flash × forward/both}
        speedup over unfused = {ours-unfused × forward/both}
        speedup over FlashAttention-3 = {flash-attention-3 × forward/both}
        memory of dense, relative to ours = {padded memory × forward/both}
        less memory than dense flash = {dense-flash memory saved forward/both}""",
    ),
    "host": Table(
        "64 samples of up to 50 rows",
        {
            "`JaggedTargetAttention`": "target_attention-host",
            "`jagged_target_attention`": "target_attention_kernel-host",
            "`JaggedSelfAttention`": "self_attention_module-host",
            "`jagged_flash_attention`": "self_attention-host",
            **ops("host"),
        },
        join_lines(
            *(f"{head}, µs = {{ours {query} µs}}" for head, query in HOST.items()),
            *(
                f"speedup over the best peer, {head} = {{best-peer {query} ×}}"
                for head, query in HOST.items()
            ),
        ),
    ),
    "table1": Table(
        "op",
        ops("paper"),
        """forward, µs = {ours forward µs}
        forward, speedup over padded = {padded forward ×}
        the paper, speedup over padded = {paper forward time ratio}
        forward, speedup over FBGEMM = {fbgemm forward ×}
        both, µs = {ours both µs}
        both, speedup over padded = {padded both ×}
        both, speedup over FBGEMM = {fbgemm both ×}""",
        results=("table1", "paper"),
    ),
    "table1_bf16": Table(
        "op",
        {f"`{op}`": op for op in OPS},
        """forward, µs = {ours forward µs @*-large}
        of the roofline = {ours forward floor @*-large}
        speedup over FBGEMM = {fbgemm forward × @*-large}
        both, of the roofline = {ours both floor @*-large}
        speedup over FBGEMM = {fbgemm both × @*-large}""",
        results=("table1",),
    ),
}
MODEL_TABLES = {
    "end_to_end": Table(
        "pooling",
        STEP_ROWS,
        steps("{* time @} ({* gpu_busy @}), {* peak_memory @}"),
        mode="step",
    ),
    "end_to_end_requests": Table(
        "pooling",
        STEP_ROWS,
        steps("{* time @} ms", "-candidates-32-features-13"),
        mode="step",
        results=("end_to_end",),
    ),
    "end_to_end_gpus": by_gpus("{* time} ({* gpu_busy}), {* throughput}"),
    "end_to_end_graphs": Table(
        "events | GPUs",
        {f"{n:,} | {gpus}": step_case(n, gpus, SHARDINGS[0]) for n in MEANS for gpus in GPUS},
        join_lines(
            *(
                f"{STEP_PROVIDERS[x]} = {{{x} time}} ({{{x} gpu_busy}}), {{{x} throughput ×}} ×"
                for x in (*GRAPH_PROVIDERS, "encoder-graph")
            )
        ),
        ours="sum",
        mode="step",
    ),
    "step_time": Table(
        "events per history | samples per GPU | GPUs",
        {
            f"{n:,} | {batch:,} | {gpus}": step_case(n, gpus, SHARDINGS[0])
            for n, batch in ((200, 4096), (1000, 2048), (4000, 512))
            for gpus in GPUS
        },
        join_lines(
            "sum pooling, `TrainPipelineSparseDist` = {sum time}",
            "sum pooling, `TrainPipelineCudaGraph` = {sum-graph time}",
            "attention, `TrainPipelineCudaGraph` = {ours-graph time}",
        ),
        results=("end_to_end_graphs",),
        mode="step",
    ),
    "end_to_end_sent": by_gpus("{* sent}, {* sent_by_length}, {* sent_rows}"),
    "end_to_end_ways": Table(
        "on two GPUs",
        {
            "200 events": "mean-200-2-gpus-row_wise",
            "1,000 events": "mean-1000-2-gpus-row_wise",
            "1,000 events, `TrainPipelineFusedSparseDist`": "mean-1000-2-gpus-row_wise-fused",
            "1,000 events, popular ids in one shard": "mean-1000-2-gpus-row_wise-by-popularity",
            "4,000 events": "mean-4000-2-gpus-row_wise",
        },
        join_lines(
            *(
                f"{STEP_PROVIDERS[name]} = {{{name} time}}"
                for name in ("sum", "ours", "ours-single-ids", "ours-index-dedup")
            )
        ),
        mode="step",
    ),
    "end_to_end_large": Table(
        "GPUs",
        {"1": "mean-1000-batch-8192", "2": "mean-1000-2-gpus-row_wise-batch-8192"},
        join_lines(
            *(
                f"{STEP_PROVIDERS[x]} = {{{x} time}} ({{{x} gpu_busy}}), {{{x} throughput}}"
                for x in ("sum", "linear-varlen", "ours")
            )
        ),
        mode="step",
    ),
    "end_to_end_quality": Table(
        "pooling",
        STEP_ROWS,
        join_lines(
            *(
                f"{words}: {metric.upper()} = {{* {metric} @{log}-1.0}}"
                for log, words in LOGS.items()
                for metric in ("auc", "ne")
            )
        ),
        mode="test",
    ),
    "quality": Table(
        "pooling",
        {label: name for name, label in POOLINGS.items()},
        join_lines(
            *(
                f"{words}: {head} = {{* {metric} @{log}}} ± {{* {metric}_se @{log}}}"
                for log, words in LOGS.items()
                for metric, head in (("auc", "AUC"), ("ahead", "difference to recency"))
            )
        ),
        mode="test",
    ),
    "auc": Table(
        "pooling of the history",
        {label: name for name, label in POOLINGS.items() if name not in ("din", "encoder")},
        join_lines(
            *(f"{words} = {{* auc @{log}}} ± {{* auc_se @{log}}}" for log, words in LOGS.items())
        ),
        results=("quality",),
        mode="test",
    ),
    "event_selection": Table(
        "events | budget",
        {
            f"{words} | {part}": f"{way}-{budget}"
            for budget, part in BUDGETS.items()
            for way, words in EVENTS.items()
            if (budget == "1") == (way in ("all", "boosted"))
        },
        join_lines(
            *(
                f"{words}: {form}".replace("@", f"@{log}")
                for log, words in EVENT_LOGS.items()
                for form in (
                    "NE = {* ne @} ± {* ne_se @}",
                    "AUC = {* auc @}",
                    "training, samples/s = {* training @} ({* training × @} ×)",
                    "inference, samples/s = {* inference @} ({* inference × @} ×)",
                )
            )
        ),
        ours="all-1",
        mode="test",
    ),
}
TABLES = {
    name: replace(table, results=table.results or (name,))
    for name, table in (MODEL_TABLES | OP_TABLES).items()
}
