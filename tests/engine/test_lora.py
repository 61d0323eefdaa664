"""Adapters of peft on a model of transformers, made from a configuration, without special code."""

from __future__ import annotations

import warnings
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import fedkeel as fk

TOKENS, LENGTH, CLASSES, RANK, WIDTH, LAYERS = 30, 8, 3, 2, 16, 2


def adapted() -> nn.Module:
    """BERT for sequences, frozen but for LoRA in its attention and the classifier."""
    transformers, peft = (pytest.importorskip(name) for name in ("transformers", "peft"))
    config = transformers.BertConfig(
        vocab_size=TOKENS,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=RANK, target_modules=["query", "value"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForSequenceClassification.from_config(config)
        return peft.get_peft_model(model, lora)


ADAPTERS = LAYERS * 2 * 2 * RANK * WIDTH + CLASSES * (WIDTH + 1)
"""Numbers in the adapters and in the classifier, which peft trains too."""


@cache
def run(kind: str, **engine: int) -> tuple[nn.Module, fk.Result]:
    random = np.random.default_rng(0)
    x = random.integers(1, TOKENS, size=(96, LENGTH))
    y = x[:, 0] % CLASSES
    train, test = {"input_ids": x[:72]}, {"input_ids": x[72:]}
    torch.manual_seed(0)
    module = adapted()
    result = fk.run(
        "fedprox",
        task=fk.Task(module),
        clients=fk.iid(train, y[:72], clients=4, tokens=True),
        test=fk.dataset(test, y[72:], tokens=True),
        rounds=2,
        local=fk.Local(lr=0.01, epochs=1, batch_size=8, optimiser="adamw", clip_norm=1.0),
        engine=fk.Engine(kind=kind, dtype="float64", **engine),
    )
    return module, result


def test_traffic_is_that_of_the_adapters_alone() -> None:
    module, result = run("sequential")
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    assert set(result.params) == set(trained)
    assert sum(p.numel() for p in trained.values()) == ADAPTERS
    assert sum(p.numel() for p in module.parameters()) > 10 * ADAPTERS
    for row in result.rows[1:]:
        assert row.bytes_up == row.bytes_down == {"model": 4 * 8 * ADAPTERS}


def test_the_whole_model_comes_back() -> None:
    """A frozen parameter is as it was, and a trained one is the federation's."""
    module, result = run("sequential")
    twin = adapted().double()
    twin.load_state_dict(result.state_dict(), strict=True)
    before, after = dict(module.named_parameters()), dict(twin.named_parameters())
    for name, parameter in before.items():
        assert torch.equal(parameter.double(), after[name]) != parameter.requires_grad
    assert {name: after[name] for name in result.params}.keys() == result.params.keys()


@pytest.mark.parametrize("kind", ["workers", "vectorized"])
def test_engines_agree_on_attention_and_adapters(kind: str) -> None:
    """Attention without dropout draws nothing, so clients run side by side by compiled steps."""
    _, result = run("sequential")
    engine = {"workers": 2} if kind == "workers" else {"workers": 1, "parallel_clients": 4}
    _, other = run(kind, **engine)
    assert other.record.engine.reasons == []
    tolerance = 0.0 if kind == "workers" else 1e-12
    for name, tensor in result.params.items():
        assert torch.allclose(other.params[name], tensor, rtol=0.0, atol=tolerance)
