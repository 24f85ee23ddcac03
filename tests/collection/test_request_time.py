"""Ages that are counted from the time of a request."""

import functools

import pytest
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.modules.target_attention_inputs import attend, attend_by_sample, make_inputs, make_module
from tests.runs import assert_same_run
from tests.tolerance import assert_matches_oracle
from torchrec_jagged_attn import JaggedTargetAttention
from torchrec_jagged_attn.semantic_ids import PackedCodes

LENGTHS = [5, 0, 40, 1]
REQUESTS = [600, 7, 10**12, -4]  # in the middle of a history, of none, long after one, before one


def times_of(device, dtype=torch.int64):
    timestamps = torch.arange(sum(LENGTHS), device=device) ** 2
    request_time = torch.tensor(REQUESTS, device=device)
    return {"timestamps": timestamps.to(dtype), "request_time": request_time.to(dtype)}


@pytest.mark.parametrize("keys_and_values", ["absorbed", "materialized"])
@pytest.mark.parametrize(
    ("targets", "dtype"), [(None, torch.int64), (3, torch.float64), ([2, 0, 1, 4], torch.int64)]
)
def test_right(targets, dtype, keys_and_values, device):
    module = make_module(
        16, 2, age_bias=True, value_projection=True, keys_and_values=keys_and_values
    )
    inputs = make_inputs(module, LENGTHS, device, targets=targets)
    ages = times_of(device, dtype)
    functions = (functools.partial(f, module, **ages) for f in (attend, attend_by_sample))
    assert_matches_oracle(*functions, inputs)


def test_over_codes(device):
    ids = PackedCodes(12, 3)
    module = JaggedTargetAttention(16, 2, age_bias=True, history_codes=ids).to(device)
    over_rows = JaggedTargetAttention(16, 2, age_bias=True, history_dim=12).to(device)
    nn.init.normal_(module.recency_bias.age_weight)
    over_rows.load_state_dict(module.state_dict())
    codes = torch.randint(-1, 2, (sum(LENGTHS), 12)).to(device)
    lengths, target = torch.tensor(LENGTHS, device=device), torch.randn(4, 16, device=device)
    packed = JaggedTensor(ids.pack(codes), lengths=lengths)
    expected = over_rows(target, JaggedTensor(codes.float(), lengths=lengths), **times_of(device))
    actual = module(target, packed, **times_of(device))
    assert_same_run(actual, expected, num_terms=2 * 12 + 2 * 16)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"request_time": torch.zeros(3).long()}, ValueError, "request_time must have shape [B] ="),
        ({"request_time": torch.zeros(2)}, TypeError, "request_time must be torch.int64 as timest"),
        ({"request_time": 5}, TypeError, "request_time must be a tensor, got a int"),
        (
            {"timestamps": None, "age_bias": False},
            ValueError,
            "request_time must be None without timestamps, got a tensor",
        ),
        (
            {"request_time": torch.zeros(2).long().to("meta")},
            ValueError,
            "request_time must be on cpu as timestamps is, got meta",
        ),
    ],
)
def test_errors_name_the_argument(change, error, message):
    options = {"embed_dim": 8, "num_heads": 2, "age_bias": True}
    arguments = {
        "target": torch.zeros(2, 8),
        "history": JaggedTensor(torch.zeros(5, 8), lengths=torch.tensor([2, 3])),
        "timestamps": torch.zeros(5, dtype=torch.int64),
        "request_time": torch.zeros(2, dtype=torch.int64),
    }
    for name, value in change.items():
        (options if name in options else arguments)[name] = value
    with pytest.raises(error) as raised:
        JaggedTargetAttention(**options)(**arguments)
    assert str(raised.value).startswith(message)
