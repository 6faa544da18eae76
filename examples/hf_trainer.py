"""The Hugging Face Trainer in blocks: a tiny Llama, interrupted and resumed. It takes seconds and downloads nothing.

pip install "blocktrain[hf]" && python examples/hf_trainer.py
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import blocktrain as bt
from blocktrain.integrations.hf import Blocks, BlockTrainer


def rows(count: int, *, tokens: int = 24, vocabulary: int = 64) -> list[dict[str, torch.Tensor]]:
    """Rows that count upwards from a random start, so that the next token can be learned."""
    counted = (torch.randint(vocabulary, (count, 1)) + torch.arange(tokens)) % vocabulary
    return [{"input_ids": row, "labels": row} for row in counted]


def trainer(folder: str, *, max_steps: int) -> BlockTrainer:
    """The call is that of `Trainer` with one new argument, `blocks`."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=64)
    )
    args = TrainingArguments(
        folder,
        max_steps=max_steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        eval_strategy="steps",
        eval_steps=30,
        save_steps=30,
        logging_steps=10,
        report_to="none",
        use_cpu=True,
    )
    return BlockTrainer(
        model,
        args,
        train_dataset=rows(640),
        eval_dataset=rows(32),
        blocks=Blocks(count=3, visit=bt.Duration.steps(20), state=bt.KeepOnHost()),
    )


def main() -> float:
    """Stop in the middle of the second visit, resume, train to the end of the fifth; returns the validation loss."""
    with tempfile.TemporaryDirectory() as folder:
        trainer(folder, max_steps=30).train()
        resumed = trainer(folder, max_steps=100)
        resumed.train(resume_from_checkpoint=True)  # block, step, moments, masters as if never stopped
        return resumed.evaluate()["eval_loss"]


if __name__ == "__main__":
    print(main())
