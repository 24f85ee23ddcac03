"""What tables of whole models show, for ``tables.py``: their steps, their quality, their goals."""

from dataclasses import dataclass

from end_to_end_cases import GPUS, SHARDINGS, step_case
from table_specs import Cell, Column, Table, one

__all__ = [
    "EVENTS",
    "GOALS",
    "ITEMS",
    "LOGS",
    "MEANS",
    "MODEL_TABLES",
    "POOLINGS",
    "SEARCH",
    "STEP_PROVIDERS",
    "Goal",
    "Goals",
]


@dataclass(frozen=True)
class Goal:
    """A ratio of two figures that is aimed at.

    Args:
        above, below: a case and a figure, each.
        bound: what the ratio has to be at least.
        at_most: whether it has to be that at most.
    """

    what: str
    above: tuple[str, Cell]
    below: tuple[str, Cell]
    bound: str
    at_most: bool = False


@dataclass(frozen=True)
class Goals:
    """What was aimed at, as a table.

    Args:
        results: the files that say if it was met, without ``.csv``.
    """

    results: tuple[str, ...]
    goals: tuple[Goal, ...]


STEP_PROVIDERS = {
    "sum": "sum pooling",
    "padded": "linear + padded SDPA",
    "padded-din": "padded activation unit",
    "fbgemm-sll": "linear + FBGEMM, SLL",
    "linear-varlen": "linear + FlashAttention-2",
    "ours": "ours",
    "ours-value-projection": "ours, values projected",
    "ours-as-peers": "ours, the function of peers",
    "ours-rows-travel": "ours, rows travel",
    "ours-single-lookup": "ours, one lookup",
    "ours-index-dedup": "ours, one lookup of unique ids",
    "ours-newer-half": "ours, the newer half of histories",
    "ours-by-request": "ours, by request, one lookup",
}
"""Those of ``end_to_end.py``, in words."""
MEANS = (50, 200, 1000, 4000)
SEARCH = "mean-1000"
"""From where ``end_to_end_memory.py`` searches."""
EPOCHS = "1.0"
"""Of ``end_to_end_quality.py``."""
POOLINGS = {
    "mean": "mean",
    "recency": "mean weighted by recency",
    "din": "DIN's activation unit, padded",
    "attention": "attention, the default",
    "attention-row-dropout": "attention, `row_dropout=0.2`",
}
"""Those of ``quality.py``, in words."""
LOGS = {
    "ml-1m": "MovieLens-1M",
    "video_games.txt.gz": "Video Games",
    "synthetic": "synthetic",
    "planted": "synthetic",
}
"""What quality is measured on, by the names of files and folders."""
ITEMS = {
    "rows": "fp32",
    "integers, 8 bits": "integers of 8 bits",
    "integers, 4 bits": "of 4 bits",
    "integers, 2 bits": "of 2 bits",
    "k-means": "residual k-means",
    "k-means + tables": "the same, tables trained",
    "discrete PCA": "`DiscretePCA`, three levels",
    "discrete PCA + basis": "the same, mean and basis trained",
    "FSQ": "finite scalar quantization",
    "hashed table": "a hashed table, trained",
    "VQ fusion + basis": "`VQFusion`, mean and basis trained",
}
"""Ways of ``semantic_ids_ranking.py`` to keep items, in words."""
EVENTS = {
    "all": "all",
    "boosted": "all, boosted by relevance",
    "relevance": "by relevance",
    "newest": "the newest",
    "random": "any",
}
"""What ``event_selection.py`` leaves of the events, in words."""
EVENT_LOGS = {
    "made-up": "made up",
    "ml-1m": "MovieLens-1M",
    "made-up-gpu": "made up, on a GPU",
}
BUDGETS = {"1": "1", "0.5": "½", "0.25": "¼", "0.125": "⅛"}


def steps(form: str, *figures: tuple[str, str], of: str = "") -> tuple[Column, ...]:
    """A column of each mean length, with a provider in each row.

    Args:
        figures: metrics and units.
        of: how the names of the cases go on after the mean.
    """
    cells = tuple(Cell("{}", "step", metric, unit) for metric, unit in figures)
    return tuple(
        Column(f"{mean:,} events, {{batch}} samples{{gpu}}", form, cells, f"mean-{mean}{of}")
        for mean in MEANS
    )


def by_gpus(form: str, *figures: tuple[str, str]) -> Table:
    """Rows of mean lengths, numbers of GPUs and shardings, with a column of each provider."""
    rows = {
        f"{mean:,} | {gpus} | {sharding.replace('_', '-') if gpus > 1 else 'whole'}": case
        for mean in MEANS
        for gpus in GPUS
        for sharding in SHARDINGS
        if gpus > 1 or sharding == SHARDINGS[0]
        for case in [step_case(mean, gpus, sharding)]
    }
    columns = tuple(
        Column(words, form, tuple(Cell(name, "step", *figure) for figure in figures))
        for name, words in STEP_PROVIDERS.items()
    )
    return Table(("end_to_end_gpus",), "events | GPUs | item table", rows, columns)


def with_error(case: str, log: str, metric: str, unit: str, head: str = "") -> Column:
    """A score of each row, and its standard error; the head is the unit if none is given."""
    cells = tuple(Cell("{}", "test", name, unit) for name in (metric, f"{metric}_se"))
    return Column(f"{log}: {head or unit}", "{} ± {}", cells, case)


def half_of_events(log: str, words: str) -> tuple[Goal, ...]:
    """What is aimed at where half of the events is left, by relevance."""
    half = "relevance-0.5"
    return tuple(
        Goal(
            f"{words}, {what}: half by relevance over {EVENTS[peer.partition('-')[0]]}",
            (log, Cell(half, "test", metric, unit)),
            (log, Cell(peer, "test", metric, unit)),
            "1",
            at_most,
        )
        for what, peer, metric, unit, at_most in (
            ("NE", "all-1", "ne", "NE", True),
            ("NE of half", "newest-0.5", "ne", "NE", True),
            ("training samples/s", "all-1", "training", "samples/s", False),
            ("inference samples/s", "all-1", "inference", "samples/s", False),
        )
    )


def step_goal(
    mean: int,
    peer: str,
    bound: str,
    *,
    metric: tuple[str, str] = ("throughput", "samples/s"),
    at_most: bool = False,
) -> Goal:
    """Of a step with ours, to that with a peer."""
    what = {"throughput": "samples/s", "time": "step time", "peak_memory": "peak memory"}[metric[0]]
    return Goal(
        f"mean {mean:,}, {what}: ours over {STEP_PROVIDERS[peer]}",
        (f"mean-{mean}", Cell("ours", "step", *metric)),
        (f"mean-{mean}", Cell(peer, "step", *metric)),
        bound,
        at_most,
    )


def speed_goal(
    what: str, case: str, ours: str, peer: str, bound: str, mode: str = "forward"
) -> Goal:
    """Of an op: a peer's time over ours."""
    return Goal(what, (case, Cell(peer, mode)), (case, Cell(ours, mode)), bound)


def goals_of_rows() -> tuple[Goal, ...]:
    """Of target attention over rows by index, by places of a row."""
    goals = []
    for places in (1, 4, 16, 64):
        case, of_places = f"rank-1k-x{places}", f"{places} place{'s' * (places > 1)} of a row"
        if places == 1:
            what = f"{of_places}, forward: to a copy made before"
            goals.append(speed_goal(what, case, "ours-by-index", "ours-copied-before", "0.9"))
        for mode, words, bound in (("forward", "forward", "1.5"), ("both", "both ways", "1.3")):
            what = f"{of_places}, {words}: to a copy made in the call"
            least = bound if places == 1 else "2"
            goals.append(speed_goal(what, case, "ours-by-index", "ours-on-a-copy", least, mode))
    return tuple(goals)


def gpus_goal(mean: int, gpus: int, what: str, peer_gpus: int, peer: str, bound: str) -> Goal:
    """Samples a second of ours with its item table by rows, to those of a peer on so many GPUs."""
    above, below = (step_case(mean, n, SHARDINGS[0]) for n in (gpus, peer_gpus))
    return Goal(
        f"mean {mean:,}, samples/s: {what}",
        (above, Cell("ours", "step", "throughput", "samples/s")),
        (below, Cell(peer, "step", "throughput", "samples/s")),
        bound,
    )


def request_goal(what: str, metric: tuple[str, str], bound: str) -> Goal:
    """Of a step with 32 candidates of each request: by request, to samples with copies."""
    case = "mean-200-candidates-32-features-13"
    by_request, by_sample = (Cell(name, "step", *metric) for name in ("ours-by-request", "ours"))
    return Goal(what, (case, by_request), (case, by_sample), bound)


GOALS = {
    "end_to_end_goals": Goals(
        ("end_to_end",),
        (
            step_goal(200, "sum", "1.35", metric=("time", "ms"), at_most=True),
            step_goal(200, "linear-varlen", "1.6"),
            step_goal(200, "padded", "2"),
            step_goal(1000, "linear-varlen", "1.8"),
            step_goal(1000, "padded", "4"),
            step_goal(4000, "padded", "6"),
            *(
                step_goal(mean, peer, "0.82", metric=("peak_memory", "MiB"), at_most=True)
                for mean in (200, 1000)
                for peer in ("padded", "linear-varlen")
            ),
        ),
    ),
    "end_to_end_gpus_goals": Goals(
        ("end_to_end_gpus",),
        (
            *(
                step_goal(mean, "sum", bound, metric=("time", "ms"), at_most=True)
                for mean, bound in ((200, "1.15"), (1000, "1.1"), (4000, "0.7"))
            ),
            *(
                gpus_goal(mean, gpus, f"{gpus} GPUs over one", 1, "ours", bound)
                for gpus, bounds in ((2, ("1.7", "1.8")), (4, ("3.2", "3.4")))
                for mean, bound in zip((1000, 4000), bounds, strict=True)
            ),
            gpus_goal(1000, 2, "2 GPUs, ours over sum pooling", 2, "sum", "0.91"),
            gpus_goal(4000, 2, "2 GPUs, ours over sum pooling", 2, "sum", "1.43"),
            gpus_goal(
                1000, 2, "2 GPUs, ours over linear + FlashAttention-2", 2, "linear-varlen", "3.5"
            ),
        ),
    ),
    "target_attention_rows_goals": Goals(("target_attention_rows",), goals_of_rows()),
    "end_to_end_requests_goals": Goals(
        ("end_to_end",),
        (request_goal("samples/s: by request over samples", ("throughput", "samples/s"), "8"),),
    ),
    "ikbo_goals": Goals(
        ("ikbo",),
        tuple(
            speed_goal(f"{words} {length:,} rows", f"ikbo-{length}{end}", "ours", "ikbo", bound)
            for words, end, bound in (("all of", "", "1"), ("1 to", "-jagged", "2"))
            for length in (512, 1024, 2048, 4096, 8192, 16384)
        ),
    ),
}
GOALS |= {
    "semantic_ids_goals": Goals(
        ("semantic_ids",),
        (
            Goal(
                "10,000 × 512 rows of 25 digits, width 128, forward: rows in bf16 over digits",
                ("full-512", Cell("ours-rows", "forward")),
                ("full-512", Cell("ours-codes", "forward")),
                "2",
            ),
        ),
    ),
    "semantic_ids_ranking_goals": Goals(
        ("semantic_ids_ranking",),
        tuple(
            Goal(
                f"footprint: k-means with tables, {size} bytes, over `DiscretePCA`, {ours} bytes",
                *(
                    ("ml-1m", Cell(way, "test", "footprint", "KiB"))
                    for way in (f"k-means + tables-{size}", f"discrete PCA + basis-{ours}")
                ),
                "3",
            )
            for size, ours in ((8, 8), (20, 20), (8, 20))
        ),
    ),
    "select_events_goals": Goals(
        ("select_events",),
        tuple(
            Goal(
                f"{op}, 4,096 log-normal of 200, {what}: PyTorch's padded top-k over ours",
                (case, Cell("padded", mode)),
                (case, Cell("ours", mode)),
                "5",
            )
            for op, case in (
                ("`select_events`", "events-200"),
                ("`select_events` without scores", "events-200-newest"),
            )
            for what, mode in (("forward", "forward"), ("forward and backward", "both"))
        ),
    ),
    "event_selection_goals": Goals(
        ("event_selection",),
        tuple(goal for log, words in EVENT_LOGS.items() for goal in half_of_events(log, words)),
    ),
}
MODEL_TABLES = {
    "end_to_end": Table(
        ("end_to_end",),
        "pooling",
        {label: name for name, label in STEP_PROVIDERS.items()},
        steps("{} ({}), {}", ("time", "ms"), ("gpu_busy", "ms"), ("peak_memory", "MiB")),
    ),
    "end_to_end_requests": Table(
        ("end_to_end",),
        "pooling",
        {label: name for name, label in STEP_PROVIDERS.items()},
        steps("{} ms", ("time", "ms"), of="-candidates-32-features-13"),
    ),
    "end_to_end_gpus": by_gpus(
        "{} ({}), {}", ("time", "ms"), ("gpu_busy", "ms"), ("throughput", "samples/s")
    ),
    "end_to_end_sent": by_gpus(
        "{}, {}, {}", ("sent", "MiB"), ("sent_by_length", "MiB"), ("sent_rows", "MiB")
    ),
    "end_to_end_selection": Table(
        ("end_to_end_selection",),
        "events",
        {"all": "ours", "the newer half": "ours-newer-half"},
        steps(
            "{} ms ({} ms of it the GPU's), {} MiB, {} ×",
            ("time", "ms"),
            ("gpu_busy", "ms"),
            ("peak_memory", "MiB"),
            ("throughput", "× ours"),
        ),
        ours="ours",
    ),
    "end_to_end_memory": Table(
        ("end_to_end_memory",),
        "pooling",
        {label: name for name, label in STEP_PROVIDERS.items()},
        (
            one("longest history", "{}", "step", "rows", metric="longest_history", case=SEARCH),
            one("largest batch", "{}", "step", "samples", metric="largest_batch", case=SEARCH),
        ),
    ),
    "end_to_end_quality": Table(
        ("end_to_end_quality",),
        "pooling",
        {label: name for name, label in STEP_PROVIDERS.items()},
        tuple(
            one(f"{words}: {unit}", "{}", "test", unit, metric=metric, case=f"{log}-{EPOCHS}")
            for log, words in LOGS.items()
            for metric, unit in (("auc", "AUC"), ("ne", "NE"))
        ),
    ),
    "quality": Table(
        ("quality",),
        "pooling",
        {label: name for name, label in POOLINGS.items()},
        tuple(
            with_error(log, words, metric, "AUC", head)
            for log, words in LOGS.items()
            for metric, head in (("auc", "AUC"), ("ahead", "less recency's"))
        ),
    ),
    "semantic_ids_ranking": Table(
        ("semantic_ids_ranking",),
        "items | bytes a row",
        {
            f"{words} | {size or '–'}": f"{way}-{size}"
            for size in (0, 8, 20)
            for way, words in ITEMS.items()
            if (size == 0) == (way == "rows" or way.startswith("integers"))
        },
        (
            one("KiB", "{}", "test", "KiB", metric="footprint", case="ml-1m"),
            with_error("ml-1m", "MovieLens-1M", "auc", "AUC"),
            with_error("ml-1m", "MovieLens-1M", "ne", "NE"),
        ),
    ),
    "event_selection": Table(
        ("event_selection",),
        "events | budget",
        {
            f"{words} | {part}": f"{way}-{budget}"
            for budget, part in BUDGETS.items()
            for way, words in EVENTS.items()
            if (budget == "1") == (way in ("all", "boosted"))
        },
        tuple(
            column
            for log, words in EVENT_LOGS.items()
            for column in (
                with_error(log, words, "ne", "NE"),
                one(f"{words}: AUC", "{}", "test", "AUC", metric="auc", case=log),
                *(
                    Column(
                        f"{words}: {rate}, samples/s",
                        "{} ({} ×)",
                        (
                            Cell("{}", "test", rate, "samples/s"),
                            Cell("{}", "test", rate, "× ours"),
                        ),
                        log,
                    )
                    for rate in ("training", "inference")
                ),
            )
        ),
        ours="all-1",
    ),
}
