"""Clients that train by Lightning: `python examples/own_training/with_lightning.py`.

Lightning is not among fedkeel's extras: `pip install lightning`.
"""

import logging
import warnings

import lightning
import torch
from plain_loop import net
from sklearn.datasets import load_digits

import fedkeel as fk

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # it greets for each client
warnings.filterwarnings("ignore", ".*does not have many workers.*")


class Digits(lightning.LightningModule):
    """A module of your own, in Lightning's form, around the model of a client."""

    def __init__(self, model, round) -> None:
        super().__init__()
        self.model, self.loss, self.lr = model, round.loss, round.lr

    def training_step(self, batch, number):
        x, y = batch
        loss = self.loss(self.model(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(y))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), lr=self.lr)


def train(model, data, round):
    """Train a client in one round."""
    trainer = lightning.Trainer(
        max_epochs=1,  # one pass over `data.batches` has all epochs of the round
        accelerator="cpu" if round.device.type == "cpu" else "gpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(model, round), data.batches)
    return {"loss": trainer.callback_metrics["loss"], "steps": trainer.global_step}


def main(rounds: int = 10, method: str = "momentum(beta=0.5)"):
    x, y = load_digits(return_X_y=True)
    return fk.run(
        method,
        task=fk.Task(net),
        clients=fk.dirichlet(x[:1400] / 16, y[:1400], clients=10, alpha=0.3),
        test=(x[1400:] / 16, y[1400:]),
        rounds=rounds,
        participation=0.5,
        local=fk.Local(lr=0.1, epochs=2, batch_size=20),
        local_training=fk.LocalTraining(train),
        engine=fk.Engine(kind="sequential"),
    )


if __name__ == "__main__":
    print(f"{main().last:.1%} of the test set")
