"""TRL's trainers in blocks, in every precision, beside the same trainers without blocks.

    python experiments/trl_trainers/trl_trainers.py     writes result.json and the table of README.md (3 minutes, CPU)

Each case trains a small Llama on rows that can be learned. One block in fp32 must end with the weights of the plain
trainer, bit for bit. Three blocks must learn, change every tensor that is to be trained and leave only finite weights.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import peft  # pyright: ignore[reportMissingImports]
import torch
import transformers
import trl  # pyright: ignore[reportMissingImports]
from datasets import Dataset
from peft import LoraConfig  # pyright: ignore[reportMissingImports]
from tabling import put
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

import blocktrain as bt
from blocktrain.integrations.hf import Blocks, BlockTrainerMixin
from blocktrain.optim.precision import Precision
from blocktrain.runtime import environment, result_path

WORDS = ["<eos>", "<pad>", *"abcdefghijklmnopqrstuvwxyz"]
KINDS = ["own head", "tied head", "LoRA"]  # of models
PRECISIONS = [bt.FP32, bt.BF16_EXACT, bt.INT8, bt.NF4]
STEPS = 30
HERE = Path(__file__).parent


class BlockSFTTrainer(BlockTrainerMixin, trl.SFTTrainer):
    """Supervised fine-tuning in blocks."""


class BlockDPOTrainer(BlockTrainerMixin, trl.DPOTrainer):
    """Direct preference optimization in blocks."""


class BlockGRPOTrainer(BlockTrainerMixin, trl.GRPOTrainer):
    """Group relative policy optimization in blocks."""


class BlockRewardTrainer(BlockTrainerMixin, trl.RewardTrainer):
    """A reward model in blocks."""


IN_BLOCKS = {
    trl.SFTTrainer: BlockSFTTrainer,
    trl.DPOTrainer: BlockDPOTrainer,
    trl.GRPOTrainer: BlockGRPOTrainer,
    trl.RewardTrainer: BlockRewardTrainer,
}


def tokenizer() -> PreTrainedTokenizerFast:
    """A letter is a token."""
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")


def model(cls: Any = LlamaForCausalLM, *, tied: bool = False) -> Any:
    """A Llama of four layers with the same random weights each time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
        tie_word_embeddings=tied,
    )
    config.num_labels = 1  # of a reward model
    return cls(config)


def early_letters(completions: list[str], **_: Any) -> list[float]:
    """What GRPO's completions are rewarded for: the share of their letters that are before "n"."""
    return [sum(letter < "n" for letter in text) / max(1, len(text)) for text in completions]


def make(cls: Any, folder: Path, blocks: Blocks | None, *, kind: str = "own head", **settings: Any) -> Any:
    """A trainer of the class `cls` of TRL: the plain one where `blocks` is None, else in blocks. kind: see `KINDS`;
    settings: of its arguments."""
    letters = WORDS[2:26]
    pairs = {"prompt": letters, "chosen": ["abc" + x for x in letters], "rejected": ["xyz" + x for x in letters]}
    kinds: dict[Any, tuple[Any, dict[str, list[str]], dict[str, Any]]] = {
        trl.SFTTrainer: (trl.SFTConfig, {"text": [x + "bcdefgh" + x for x in letters]}, {"max_length": 12}),
        trl.DPOTrainer: (trl.DPOConfig, pairs, {"max_length": 12}),
        trl.GRPOTrainer: (
            trl.GRPOConfig,
            {"prompt": letters},
            {"max_completion_length": 8, "num_generations": 4, "per_device_train_batch_size": 16},
        ),
        trl.RewardTrainer: (trl.RewardConfig, pairs, {"max_length": 12}),
    }
    config, rows, own = kinds[cls]
    arguments = config(
        str(folder),
        **{
            "per_device_train_batch_size": 4,
            "max_steps": STEPS,
            "learning_rate": 3e-2 if kind == "LoRA" else 3e-3,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
            "gradient_checkpointing": False,
            **own,
            **settings,
        },
    )
    more = {
        trl.GRPOTrainer: {"reward_funcs": early_letters},
        trl.DPOTrainer: {} if kind == "LoRA" else {"ref_model": model(tied=kind == "tied head")},
    }.get(cls, {})
    if kind == "LoRA":
        task = "SEQ_CLS" if cls is trl.RewardTrainer else "CAUSAL_LM"
        more["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type=task)
    return (cls if blocks is None else partial(IN_BLOCKS[cls], blocks=blocks))(
        model=model(
            LlamaForSequenceClassification if cls is trl.RewardTrainer else LlamaForCausalLM, tied=kind == "tied head"
        ),
        args=arguments,
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer(),
        **more,
    )


def train(trainer: Any) -> dict[str, Any]:
    """What became of it: mean loss (GRPO: reward) of the first and the last third of the steps, and the weights."""
    trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    before = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    after = trainer.model.state_dict()
    watched = "reward" if isinstance(trainer, trl.GRPOTrainer) else "loss"
    values = [logged[watched] for logged in trainer.state.log_history if watched in logged]
    third = len(values) // 3
    return {
        "watched": watched,
        "first": sum(values[:third]) / third,
        "last": sum(values[-third:]) / third,
        "finite": all(map(math.isfinite, values)) and all(bool(value.isfinite().all()) for value in after.values()),
        "unchanged": [name for name in trained if torch.equal(before[name], after[name].to(before[name].dtype))],
        "weights": after,
    }


def learned(found: dict[str, Any]) -> bool:
    """Whether the watched value got better."""
    gained = found["last"] - found["first"]
    return gained > 0 if found["watched"] == "reward" else gained < 0


def row(cls: Any, precision: Precision, kind: str, folder: Path) -> dict[str, Any]:
    """One case; raises nothing, because an error is a result too."""
    found: dict[str, Any] = {"trainer": cls.__name__, "precision": precision.name, "model": kind}
    try:
        if precision == bt.FP32:
            plain = train(make(cls, folder, None, kind=kind))
            whole = train(make(cls, folder, Blocks(count=1), kind=kind))
            same = [torch.equal(whole["weights"][name], value) for name, value in plain["weights"].items()]
            found |= {"plain_last": plain["last"], "one_block_is_plain": all(same)}
        in_blocks = train(make(cls, folder, Blocks(count=3, precision=precision), kind=kind))
    except Exception as error:
        return {**found, "error": f"{type(error).__name__}: {error}"}
    in_blocks.pop("weights")
    return {**found, **in_blocks, "learned": learned(in_blocks)}


def table(result: dict[str, Any]) -> str:
    """The rows as Markdown."""
    lines = [
        "| trainer | model | precision | one block = plain trainer | first third | last third | learns, finite |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in result["rows"]:
        if "error" in each:
            lines.append(f"| {each['trainer']} | {each['model']} | {each['precision']} | {each['error']} |")
            continue
        same = {True: "bit for bit", False: "no", None: "-"}[each.get("one_block_is_plain")]
        good = "yes" if each["learned"] and each["finite"] and not each["unchanged"] else "NO"
        values = f"{each['watched']} {each['first']:.3f} | {each['last']:.3f}"
        lines.append(f"| {each['trainer']} | {each['model']} | {each['precision']} | {same} | {values} | {good} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=result_path, default=str(HERE / "result.json"))
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for cls in IN_BLOCKS:
            for kind in KINDS if cls is not trl.RewardTrainer else KINDS[::2]:
                rows += [row(cls, precision, kind, Path(folder)) for precision in PRECISIONS]
                print(json.dumps(rows[-len(PRECISIONS) :], indent=1), flush=True)
    versions = {module.__name__: module.__version__ for module in (torch, transformers, trl, peft)}
    result = {"rows": rows, "steps": STEPS, "versions": versions, "date": datetime.now(UTC).date().isoformat()}
    result["environment"] = environment(torch.device("cpu"))
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.out.parent == HERE:
        put(HERE / "README.md", "trl_trainers.py", table(result))


if __name__ == "__main__":
    main()
