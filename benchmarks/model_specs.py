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


def gpus_goal(mean: int, gpus: int, what: str, peer_gpus: int, peer: str, bound: str) -> Goal:
    """Samples a second of ours with its item table by rows, to those of a peer on so many GPUs."""
    above, below = (step_case(mean, n, SHARDINGS[0]) for n in (gpus, peer_gpus))
    return Goal(
        f"mean {mean:,}, samples/s: {what}",
        (above, Cell("ours", "step", "throughput", "samples/s")),
        (below, Cell(peer, "step", "throughput", "samples/s")),
        bound,
    )


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
