"""Adapters (LoRA) on a language model: clients train and send a few numbers of many.

    python examples/lora.py FOLDER [--quick] [--out RUNS]

FOLDER holds `input.txt`, as for `shakespeare.py`, whose roles are the clients. The model is GPT-2's
architecture from `transformers`, made from a configuration, so nothing is downloaded. First it is
trained on the 20 largest roles in one place, as a stand-in for a published model. Then it is
frozen, and `peft` puts adapters beside its attention. The other roles train these alone: frozen
parameters are neither trained nor sent.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from shakespeare import LENGTH, examples, read
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import fedkeel as fk


def model_of(characters: int) -> nn.Module:
    """Return a small GPT-2 without dropout, which returns a mapping with `logits` [B, T, V]."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=characters,
            n_positions=LENGTH,
            n_embd=64,
            n_layer=2,
            n_head=4,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        )
    )


def with_adapters(model: nn.Module, rank: int = 4) -> nn.Module:
    """Return the model, frozen, with trainable adapters beside its attention (Hu et al., 2021)."""
    targets = ["c_attn"]
    return get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, fan_in_fan_out=True)
    )


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Print the table, and return perplexity and traffic of adapters and of the whole model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--out", type=Path, help="folder of the runs, which can be continued")
    given = parser.parse_args(arguments)
    first_rounds, rounds = (1, 2) if given.quick else (10, 20)

    texts = read(given.folder)
    alphabet = "".join(sorted(set("".join(texts.values()))))
    largest = sorted(texts, key=lambda role: -len(texts[role]))[: max(1, min(20, len(texts) // 2))]
    others = [role for role in texts if role not in largest]

    def parts(roles: Sequence[str]) -> tuple[dict, tuple[np.ndarray, np.ndarray]]:
        """Return the first 80 % of the text of each role, and the rest of all: inputs by name."""
        train = {
            role: examples(texts[role][: len(texts[role]) * 4 // 5], alphabet) for role in roles
        }
        late = [examples(texts[role][len(texts[role]) * 4 // 5 :], alphabet) for role in roles]
        x, y = (np.concatenate(arrays) for arrays in zip(*late, strict=True))
        by_name = {role: ({"input_ids": x}, y) for role, (x, y) in train.items()}
        return by_name, ({"input_ids": x}, y)

    def run(method: str, model: nn.Module, roles: Sequence[str], rounds: int, name: str):
        clients, test = parts(roles)
        return fk.run(
            method,
            task=fk.Task(model, loss="token_cross_entropy", metrics=["perplexity"]),
            clients=fk.from_clients(clients, tokens=True),
            test=test,
            rounds=rounds,
            clients_per_round=min(10, len(roles)),
            local=fk.Local(lr=0.003, epochs=1, batch_size=16, optimiser="adamw"),
            evaluation=fk.Evaluation(every=rounds),
            out=given.out and given.out / name,
        )

    torch.manual_seed(0)
    base = model_of(len(alphabet))
    state = run("centralised", base, largest, first_rounds, "base").state_dict()
    scores = {}
    for name in ("adapters", "whole model"):
        torch.manual_seed(0)
        model = model_of(len(alphabet))
        model.load_state_dict(state)
        result = run(
            "fedavg", with_adapters(model) if name == "adapters" else model, others, rounds, name
        )
        scores[name] = {
            "before": result.scores()[0][1],
            "after": result.last,
            "kB up": sum(result.rows[-1].bytes_up.values()) / len(result.rows[-1].clients) / 1000,
        }

    print("| trained and sent | perplexity before | after | kB from a client in a round |")
    print("| --- | --- | --- | --- |")
    for name, values in scores.items():
        before, after, size = values.values()
        print(f"| {name} | {before:.2f} | {after:.2f} | {size:.1f} |")
    return scores


if __name__ == "__main__":
    main()
