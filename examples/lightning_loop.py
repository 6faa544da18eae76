"""Lightning in blocks: a tiny Llama in a LightningModule. It takes seconds on one core and downloads nothing.

pip install "blocktrain[lightning]" && python examples/lightning_loop.py
"""

import lightning
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import blocktrain as bt
from blocktrain.integrations.visiting import VisitingOptimizer


class InBlocks(lightning.LightningModule):
    """Three blocks, visits of 20 optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(
            LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=64)
        )
        self.visiting: VisitingOptimizer | None = None

    def configure_optimizers(self):
        """One optimizer that moves from block to block by itself; any of torch's schedulers can set its rate."""
        partition = bt.partition(self.model, num_blocks=3)
        blocks = bt.BlockOptimizer(partition, torch.optim.AdamW, lr=1e-2, state=bt.KeepOnHost())
        self.visiting = VisitingOptimizer(blocks, bt.Cyclic(visit=bt.Duration.steps(20)))
        return self.visiting

    def on_train_batch_start(self, batch, batch_idx) -> None:
        """Frozen layers stay in eval mode, whatever Lightning does to the modes."""
        assert self.visiting is not None
        self.visiting.train()

    def training_step(self, batch, batch_idx):
        """The loss of a batch."""
        return self.model(input_ids=batch, labels=batch).loss

    def validation_step(self, batch, batch_idx) -> None:
        """Log the loss of validation rows, for the logger and the checkpoints."""
        self.log("validation_loss", self.model(input_ids=batch, labels=batch).loss)


def rows(count: int, *, tokens: int = 24, vocabulary: int = 64) -> torch.Tensor:
    """Rows that count upwards from a random start, so that the next token can be learned."""
    return (torch.randint(vocabulary, (count, 1)) + torch.arange(tokens)) % vocabulary


def main(folder: str | None = None, *, max_steps: int = 100, resume: str | None = None) -> lightning.Trainer:
    """Train for 100 steps; returns the trainer."""
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        max_steps=max_steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    loaders = DataLoader(rows(1600), batch_size=8), DataLoader(rows(32), batch_size=8)
    trainer.fit(InBlocks(), *loaders, ckpt_path=resume)
    return trainer


if __name__ == "__main__":
    print(float(main().callback_metrics["validation_loss"]))
