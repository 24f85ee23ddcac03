"""``HistoryCache``: what it gives is the newest events of each user, as if looked up anew."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures import sync_debug_mode
from torchrec_jagged_attn import HistoryCache, jagged_target_attention
from torchrec_jagged_attn.devices import implementation, supported_dtypes
from torchrec_jagged_attn.testing import (
    assert_close,
    target_attention_oracle,
    target_attention_plain,
)

CPU = torch.device("cpu")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def all_rows(user: int, width: int) -> torch.Tensor:
    return torch.randn(300, width, generator=torch.Generator().manual_seed(user))


def rows_of(user: int, begin: int, end: int, like: torch.Tensor) -> torch.Tensor:
    """Rows of a user's events, each its own, as a table would give them."""
    return all_rows(user, like.shape[1])[begin:end].to(like.device)


def request(cache: HistoryCache, num_events: dict[int, int]):
    """Append these numbers of events, and write the rows that the cache lacks."""
    lacks, cached = cache.append(list(num_events), list(num_events.values()))
    new = [
        rows_of(user, number - lack, number, cache.rows)
        for (user, number), lack in zip(num_events.items(), lacks, strict=True)
    ]
    cached.write(torch.cat([rows_of(0, 0, 0, cache.rows), *new]))
    return lacks, cached


def looked_up(cache: HistoryCache, num_events: dict[int, int]) -> torch.Tensor:
    """The newest rows of these users, looked up anew."""
    rows = [
        rows_of(user, max(0, number - cache.max_history), number, cache.rows)
        for user, number in num_events.items()
    ]
    return torch.cat([rows_of(0, 0, 0, cache.rows), *rows])


BATCHES = st.lists(  # of requests: users, and how many events each has had
    st.dictionaries(st.integers(0, 5), st.integers(0, 40), max_size=4), min_size=1, max_size=12
)


@given(BATCHES, st.integers(1, 9), st.integers(1, 5), st.integers(0, 20))
def test_it_gives_the_newest_events(batches, max_history, page_size, spare):
    """Whatever came before; it lacks what came since, or, of those who left, all."""
    pages_of_one = (max_history + 2 * page_size - 2) // page_size
    capacity = 4 * pages_of_one * page_size + spare  # of the largest batch
    cache = HistoryCache(8, max_history, capacity=capacity, page_size=page_size)
    cache.rows.fill_(torch.nan)  # of which nothing may be read before it is written
    known: dict[int, int] = {}  # events at the last request, of users who have not left
    for batch in batches:
        known = {user: number for user, number in known.items() if user in cache}
        lacks, cached = request(cache, batch)
        for (user, number), lack in zip(batch.items(), lacks, strict=True):
            before = known.get(user, 0)
            before = before if number >= before else 0
            assert lack == min(number - before, max_history)
        lengths = [min(number, max_history) for number in batch.values()]
        assert cached.offsets.diff().tolist() == lengths
        assert len(set(cached.indices.tolist())) == sum(lengths)
        assert all(x.data_ptr() % 16 == 0 for x in cached[2:])
        assert torch.equal(cached.read(), looked_up(cache, batch))
        known |= batch
        assert all((user in cache) == (number > 0) for user, number in batch.items())


@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 60), st.data())
def test_so_many_users_always_fit(max_history, page_size, spare, data):
    pages_of_one = (max_history + 2 * page_size - 2) // page_size
    capacity = pages_of_one * page_size + spare
    cache = HistoryCache(8, max_history, capacity=capacity, page_size=page_size)
    assert cache.max_users == capacity // page_size // pages_of_one >= 1
    users = range(cache.max_users)
    for _ in range(3):
        num_events = data.draw(st.lists(st.integers(0, 40), min_size=len(users)))
        batch = dict(zip(users, num_events, strict=False))
        _, cached = request(cache, batch)
        assert torch.equal(cached.read(), looked_up(cache, batch))


def test_those_who_are_idle_longest_leave():
    cache = HistoryCache(8, 4, capacity=24, page_size=4)  # of six pages
    request(cache, {1: 4, 2: 4, 3: 4, 4: 4, 5: 4, 6: 4})
    request(cache, {1: 4})
    request(cache, {7: 4, 8: 1})
    assert [user for user in range(9) if user in cache] == [1, 4, 5, 6, 7, 8]
    lacks, cached = request(cache, {1: 4, 2: 4})
    assert lacks == [0, 4]
    assert torch.equal(cached.read(), looked_up(cache, {1: 4, 2: 4}))
    cache.remove([1, 9])
    assert 1 not in cache
    assert len(cache) == 5
    cache.clear()
    assert len(cache) == 0
    lacks, _ = request(cache, dict.fromkeys(range(6), 4))  # all pages are free again
    assert lacks == [4] * 6


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("by_user", [False, True], ids=["one query", "jagged queries"])
def test_attention_reads_cached_rows_as_those_looked_up(device, dtype, by_user):
    """Bit for bit, without a copy; on a GPU, rows without indices may have other kernels."""
    if dtype not in supported_dtypes(device):
        pytest.skip(f"{dtype} is not computed by {implementation(device)[0]}")
    cache = HistoryCache(32, 100, capacity=2000, dtype=dtype, device=device)
    request(cache, {1: 90, 2: 17, 3: 250})
    request(cache, {4: 30, 1: 93})
    batch = {3: 251, 5: 0, 1: 120, 2: 17, 6: 1}
    _, cached = request(cache, batch)
    rows = looked_up(cache, batch).to(dtype)
    query_offsets = torch.tensor([0, 2, 3, 3, 8, 9], device=device, dtype=torch.int32)
    query = torch.randn(9 if by_user else 5, 2, 32, generator=torch.Generator().manual_seed(0))
    query = query.to(device, dtype)
    options = {"query_offsets": query_offsets} if by_user else {}
    out = jagged_target_attention(
        query, cached.rows, cached.offsets, indices=cached.indices, **options
    )
    in_order = torch.arange(len(rows), device=device)
    by_index = jagged_target_attention(query, rows, cached.offsets, indices=in_order, **options)
    assert torch.equal(out, by_index)
    if device == CPU:
        assert torch.equal(out, jagged_target_attention(query, rows, cached.offsets, **options))
    assert torch.equal(cached.read(), rows)


def test_attention_over_int8_rows(device):
    """As over the values that they stand for."""
    cache = HistoryCache(32, 100, capacity=2000, dtype=torch.int8, device=device)
    request(cache, {1: 90, 2: 17})
    batch = {1: 120, 3: 40, 4: 0, 2: 17}
    _, cached = request(cache, batch)
    rows = looked_up(cache, batch)
    scales = rows.abs().amax(1, keepdim=True) / 127
    dequantized = (rows / scales).round() * scales
    assert torch.equal(cached.read(), dequantized)
    errors = (cached.read().double() - rows.double()).abs()
    half = 0.5 + 127 * torch.finfo(torch.float32).eps  # of a step, and the quotient's rounding
    assert (errors <= half * scales).all()
    query = torch.randn(4, 2, 32, generator=torch.Generator().manual_seed(0)).to(device)
    inputs = (query, dequantized, cached.offsets)
    expected = target_attention_oracle(*(x.double() for x in inputs[:2]), cached.offsets)
    out = jagged_target_attention(query, cached.read(), cached.offsets)
    assert_close(out, expected, target_attention_plain(*inputs))


def test_int8_rows_of_zeros(device):
    cache = HistoryCache(4, 2, capacity=64, dtype=torch.int8, device=device)
    _, cached = cache.append([1], [2])
    cached.write(torch.tensor([[0.0, 0, 0, 0], [0, -2, 1, 0]], device=device))
    assert cached.read().tolist()[0] == [0, 0, 0, 0]
    assert cached.read()[1, 1] == -2


def test_int8_rows_that_are_not_finite(device):
    """No value of theirs is finite, and they are not those of others."""
    cache = HistoryCache(3, 4, capacity=64, dtype=torch.int8, device=device)
    _, cached = cache.append([1, 2], [3, 1])
    inf, nan = torch.inf, torch.nan
    rows = torch.tensor([[1, inf, 0], [nan, -2, 300], [inf, -inf, 1], [1, -127, 0]], device=device)
    cached.write(rows)
    assert not cached.read()[:3].isfinite().any()
    assert cached.read()[3].tolist() == [1, -127, 0]


def test_int8_rows_of_the_smallest_values(device):
    """Whose largest value over 127 is subnormal: rounded itself, by which others would overflow."""
    cache = HistoryCache(4, 4, capacity=64, dtype=torch.int8, device=device)
    _, cached = cache.append([1], [1])
    rows = torch.tensor([[190 * 2.0**-149, -190 * 2.0**-149, 2.0**-149, 0]], device=device)
    cached.write(rows)
    assert (cached.read().sign() * rows.sign() >= 0).all()
    assert ((cached.read() - rows).abs() <= torch.finfo(torch.float32).tiny / 2).all()


def test_the_cache_keeps_no_graph(device):
    cache = HistoryCache(8, 20, capacity=96, device=device)
    _, cached = cache.append([1], [2])
    cached.write(torch.ones(2, 8, device=device, requires_grad=True))
    assert not cache.rows.requires_grad
    assert torch.equal(cached.read(), torch.ones(2, 8, device=device))


@pytest.mark.parametrize(("dtype", "row_bytes"), [*((x, 8 * x.itemsize) for x in FLOATS)])
def test_a_capacity_in_bytes(dtype, row_bytes):
    cache = HistoryCache(8, 4, capacity_bytes=100 * row_bytes, page_size=4, dtype=dtype)
    assert cache.rows.shape == (100, 8)
    assert cache.rows.nbytes == 100 * row_bytes


def test_a_capacity_in_bytes_counts_scales():
    cache = HistoryCache(8, 4, capacity_bytes=120, page_size=2, dtype=torch.int8)
    assert cache.rows.nbytes + cache.scales.nbytes == 120


ARGUMENTS = {"width": 8, "max_history": 20, "capacity": 64}
BAD_ARGUMENTS = {
    "width": ({"width": 0}, ValueError, "width must be at least 1, got 0"),
    "float": ({"max_history": 2.5}, TypeError, r"max_history must be an int, got 2\.5"),
    "dtype": ({"dtype": torch.int64}, TypeError, "dtype must be one of float32, .*int8, got torch"),
    "both": ({"capacity_bytes": 9}, ValueError, "one of capacity and .* be given, got both"),
    "none": ({"capacity": None}, ValueError, "one of capacity and .* be given, got none"),
    "small": (
        {"capacity": 47},
        ValueError,
        "the capacity must be 48 to 2147483647 rows for max_history 20 in pages of 16, got 47",
    ),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_arguments(case):
    change, error, message = BAD_ARGUMENTS[case]
    with pytest.raises(error, match=message):
        HistoryCache(**ARGUMENTS | change)


BAD_BATCHES = {
    "twice": ([1, 2, 1], [1, 1, 2], ValueError, "users must be named once each, got 1 twice"),
    "fewer": ([1, 2], [1], ValueError, "num_events must be as many as users, 2, got 1"),
    "negative": ([1], [-1], ValueError, "num_events must be at least 0, got -1"),
    "tensor": (torch.tensor([1, 1]), [1, 1], TypeError, "users must be ints, .*, got tensors"),
    "true": ([1], [True], TypeError, "num_events must be an int, got True"),
    "many": (
        [*range(5)],
        [17] * 5,
        ValueError,
        "must fit into the 96 rows of the cache together, got 160 rows of 5 users",
    ),
}


@pytest.mark.parametrize("case", BAD_BATCHES)
def test_a_refused_batch_changes_nothing(case):
    users, num_events, error, message = BAD_BATCHES[case]
    cache = HistoryCache(8, 20, capacity=96)
    request(cache, {1: 20, 9: 3})
    with pytest.raises(error, match=message):
        cache.append(users, num_events)
    lacks, cached = request(cache, {1: 20, 9: 3})
    assert lacks == [0, 0]
    assert torch.equal(cached.read(), looked_up(cache, {1: 20, 9: 3}))


def test_rows_must_be_those_that_are_lacking():
    _, cached = HistoryCache(8, 20, capacity=96).append([1], [2])
    with pytest.raises(ValueError, match="rows must be the 2 that the cache lacked, got 1"):
        cached.write(torch.zeros(1, 8))
    with pytest.raises(
        ValueError, match=r"rows must have shape \[M, D\] = \[any, 8\], got \[2, 4\]"
    ):
        cached.write(torch.zeros(2, 4))
    with pytest.raises(ValueError, match="rows must be on cpu as the cache is, got meta"):
        cached.write(torch.zeros(2, 8, device="meta"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_the_host_does_not_wait(dtype):
    device = torch.device("cuda")
    cache = HistoryCache(32, 100, capacity=2000, dtype=dtype, device=device)
    rows = torch.randn(1000, 32, device=device)
    query = torch.randn(2, 2, 32, device=device, dtype=torch.bfloat16)
    for mode, ends in (("default", [50, 80]), ("error", [51, 180])):  # kernels are compiled first
        with sync_debug_mode(mode):
            lacks, cached = cache.append([1, 2], ends)
            cached.write(rows[: sum(lacks)])
            read, offsets = cached.read().bfloat16(), cached.offsets
            out = jagged_target_attention(query, read, offsets)
            if dtype == torch.bfloat16:
                by_index = jagged_target_attention(
                    query, cached.rows, offsets, indices=cached.indices
                )
    expected = target_attention_oracle(query.double(), read.double(), offsets)
    plain = target_attention_plain(query, read, offsets)
    assert_close(out, expected, plain)
    if dtype == torch.bfloat16:
        assert_close(by_index, expected, plain)
