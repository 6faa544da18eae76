"""Your own training loop: a tiny Llama, one block at a time. It takes seconds on one core and downloads nothing.

python examples/plain_loop.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import blocktrain as bt


def batches(count: int, *, rows: int = 16, tokens: int = 24, vocabulary: int = 64):
    """Rows that count upwards from a random start, so that the next token can be learned."""
    for _ in range(count):
        start = torch.randint(vocabulary, (rows, 1))
        row = (start + torch.arange(tokens)) % vocabulary
        yield {"input_ids": row, "labels": row}


def main() -> float:
    """Train for six visits of 20 steps; returns the last loss."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=64)
    )
    partition = bt.partition(model, num_blocks=3)
    optimizer = bt.BlockOptimizer(partition, torch.optim.AdamW, lr=1e-2, state=bt.KeepOnHost())
    schedule = bt.Cyclic(sweeps=2, visit=bt.Duration.steps(20))
    loss = torch.tensor(float("nan"))
    for visit in schedule.visits(partition):
        with optimizer.visit(visit.block):  # gradients, master and moments exist for this block only
            for batch in batches(20):
                loss = model(**batch).loss
                loss.backward()
                optimizer.clip_grad_norm(1.0)
                optimizer.step()
                optimizer.zero_grad()
        print(f"visit {visit.index}  {visit.block}  loss {loss.item():.3f}")
    return loss.item()


if __name__ == "__main__":
    main()
