"""Clients that train adapters by the Trainer of Hugging Face, and send only these.

    pip install 'fedkeel[hf]' accelerate
    python examples/own_training/with_trainer.py

The model is BERT's architecture made from a configuration, and the texts are made up, so nothing is
downloaded: praise and blame have words of their own among others. The model is frozen, and `peft`
puts adapters (LoRA) beside its attention.
"""

import tempfile

import numpy as np
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

import fedkeel as fk

WORDS, LENGTH = 100, 24


def texts(count: int, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return texts, and whether each is praise: a quarter of its words are then of 20 others."""
    random = np.random.default_rng(seed)
    label = random.integers(0, 2, size=count)
    words = random.integers(40, WORDS, size=(count, LENGTH))
    telling = random.integers(0, 20, size=(count, LENGTH)) + 20 * label[:, None]
    words = np.where(random.random((count, LENGTH)) < 0.25, telling, words)
    return {"input_ids": words}, label


def model() -> nn.Module:
    """Return a small model whose adapters and classifier are trained."""
    bert = BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
            num_labels=2,
            hidden_dropout_prob=0.0,
        )
    )
    adapters = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["query", "value", "dense"],
        modules_to_save=["classifier"],
    )
    return get_peft_model(bert, adapters)


def train(model, data, round):
    """Train a client in one round."""
    rows = [{**x, "labels": y} for x, y in data]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=round.batch_size,
            num_train_epochs=round.epochs,
            learning_rate=round.lr,
            lr_scheduler_type="constant",
            seed=round.seed,
            use_cpu=round.device.type == "cpu",
            dataloader_pin_memory=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        trained = trainer.train()
    return {"loss": trained.training_loss, "steps": trained.global_step}


def main(rounds: int = 5, method: str = "momentum(beta=0.5)", examples: int = 200):
    return fk.run(
        method,
        task=fk.Task(model),
        clients=fk.from_clients({f"site {k}": texts(examples, k) for k in range(4)}, tokens=True),
        test=texts(500, seed=9),
        rounds=rounds,
        local=fk.Local(lr=0.01, epochs=1, batch_size=16),
        local_training=fk.LocalTraining(train),
        engine=fk.Engine(kind="sequential"),
    )


if __name__ == "__main__":
    result = main()
    sent = sum(result.rows[-1].bytes_up.values()) / 4 / 1000
    print(f"{result.last:.1%} of the test set, {sent:.0f} kB from a client in a round")
