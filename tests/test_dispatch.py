"""Kernel dispatch: which variant is chosen, its table and its log."""

import logging

import pytest
import torch

from torchrec_jagged_attn.ops import dispatch
from torchrec_jagged_attn.ops.dispatch import (
    Choice,
    Condition,
    KernelVariant,
    choose,
    log_choice,
    table,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
VARIANTS = (
    KernelVariant(
        "narrow",
        (
            Condition("width at most 8", lambda call: call["width"] <= 8),
            Condition("no bias", lambda call: not call["bias"]),
        ),
        runs_on=lambda device: device.type == "cuda",
        device="a GPU",
        samples="samples of up to 64 rows",
    ),
    KernelVariant("general"),
)


@pytest.mark.parametrize(
    ("device", "width", "bias", "expected"),
    [
        (CUDA, 8, False, Choice("narrow", ())),
        (CUDA, 9, True, Choice("general", (("narrow", "width at most 8"),))),
        (CUDA, 8, True, Choice("general", (("narrow", "no bias"),))),
        (CPU, 8, False, Choice("general", (("narrow", "a GPU"),))),
    ],
)
def test_the_first_variant_that_supports_the_call(device, width, bias, expected):
    call = {"width": width, "bias": bias}
    assert choose(VARIANTS, device, call) == expected


def test_calls_that_no_variant_supports_are_refused():
    with pytest.raises(NotImplementedError, match=r"narrow.*no bias"):
        choose(VARIANTS[:1], CUDA, {"width": 1, "bias": True})


def test_the_table_has_the_variants_of_a_device():
    narrow = "samples of up to 64 rows; width at most 8; no bias"
    assert table(VARIANTS, CUDA) == {"narrow": narrow, "general": "all else"}
    assert table(VARIANTS, CPU) == {"general": "all else"}


def test_a_choice_is_logged_once_for_each_line_that_calls(monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "_logged", set())
    choice = Choice("general", (("narrow", "no bias"),))
    caplog.set_level(logging.INFO)
    log_choice("forward", choice)
    assert not caplog.messages
    monkeypatch.setattr(dispatch, "LOG", True)
    for _ in range(2):
        log_choice("forward", choice)
    log_choice("forward", choice)
    said = "forward uses general; not narrow: needs no bias"
    first, second = (message.split(": ", 1) for message in caplog.messages)
    assert first[0].startswith(__file__)
    assert (first[1], second[1]) == (said, said)
    assert first[0] != second[0]


@pytest.mark.parametrize("handled_by", ["the logger", "another", "none"])
def test_a_line_is_logged_once_whichever_logger_has_a_handler(handled_by, monkeypatch, capsys):
    handler = logging.Handler()
    handler.emit = lambda record: print(record.getMessage())
    logger, parent = logging.Logger("child"), logging.Logger("parent", logging.WARNING)
    logger.parent = parent
    if handled_by != "none":
        {"the logger": logger, "another": parent}[handled_by].addHandler(handler)
    monkeypatch.setattr(dispatch, "LOG", True)
    monkeypatch.setattr(dispatch, "_logger", logger)
    monkeypatch.setattr(dispatch, "_logged", set())
    log_choice("forward", Choice("general", ()))
    said = capsys.readouterr()
    assert (said.out + said.err).count("forward uses general") == 1
