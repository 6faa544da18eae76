"""Names of settings that people know from other trainers (transformers, TRL, Axolotl, LLaMA-Factory), and ours.

An unknown key of these is answered with our key, not with the one that is spelled most like it.
"""

from __future__ import annotations

from collections.abc import Collection

_DATA_SOURCE = "source in the table of the data, [chat], [text], [labelled] or [images]"
_ROW_TOKENS = "row_tokens in the table of the data, [chat], [text] or [labelled]"
_EPOCHS = 'stop.duration, such as "3 epochs"'

OUR_NAMES: dict[str, str] = {
    "adam_beta1": "optimizer.options, such as { betas = [0.9, 0.999] }",
    "adam_beta2": "optimizer.options, such as { betas = [0.9, 0.999] }",
    "adam_epsilon": "optimizer.options, such as { eps = 1e-8 }",
    "base_model": "model.path",
    "batch_size": "batch.rows",
    "bf16": 'precision = "bf16-exact"',
    "block_size": _ROW_TOKENS,
    "chat_template": "chat.template",
    "cutoff_len": _ROW_TOKENS,
    "dataset": _DATA_SOURCE,
    "dataset_name": _DATA_SOURCE,
    "dataset_text_field": "text.text_field",
    "datasets": _DATA_SOURCE,
    "deepspeed": 'distributed.layout = "fsdp"',
    "dtype": "precision",
    "early_stopping_patience": "stop.patience",
    "epochs": _EPOCHS,
    "eval_batch_size": "evaluation.batch_rows",
    "eval_steps": 'evaluation.every, such as "100 steps"',
    "eval_strategy": 'evaluation.every, such as "100 steps"',
    "fp16": 'precision = "bf16-exact"',
    "fsdp": 'distributed.layout = "fsdp"',
    "gradient_accumulation_steps": "batch.rows, the rows of a whole step, with batch.micro_rows at a time",
    "gradient_checkpointing": 'memory.checkpointing = "layers"',
    "learning_rate": "optimizer.lr",
    "load_best_model_at_end": "checkpoint.keep_best, for export --checkpoint best",
    "load_in_4bit": 'precision = "nf4"',
    "load_in_8bit": 'precision = "int8"',
    "logging_steps": "log_every",
    "lr": "optimizer.lr",
    "lr_scheduler_type": "learning_rate.shape",
    "max_grad_norm": "optimizer.max_grad_norm",
    "max_length": _ROW_TOKENS,
    "max_seq_len": _ROW_TOKENS,
    "max_seq_length": _ROW_TOKENS,
    "max_steps": 'stop.duration, such as "1000 steps"',
    "micro_batch_size": "batch.micro_rows",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "num_epochs": _EPOCHS,
    "num_train_epochs": _EPOCHS,
    "optim": "optimizer.name",
    "output_dir": "the option --out",
    "packing": "chat.layout",
    "per_device_eval_batch_size": "evaluation.batch_rows",
    "per_device_train_batch_size": "batch.micro_rows, at a time on a card; batch.rows is the whole step",
    "report_to": "tracking.to",
    "resume_from_checkpoint": "the command 'blocktrain resume'",
    "run_name": "name",
    "save_steps": 'checkpoint.every, such as "500 steps"',
    "save_strategy": 'checkpoint.every, such as "500 steps"',
    "save_total_limit": "checkpoint.keep",
    "sequence_len": _ROW_TOKENS,
    "tokenizer_name": "tokenizer in the table of the data, [chat], [text] or [labelled]",
    "torch_dtype": "precision",
    "train_batch_size": "batch.rows",
    "train_file": _DATA_SOURCE,
    "use_liger_kernel": 'memory.kernels = "liger"',
    "warmup_ratio": "learning_rate.warmup_steps, in steps",
    "warmup_steps": "learning_rate.warmup_steps",
    "weight_decay": "optimizer.weight_decay",
}


def our_names(keys: Collection[str]) -> str:
    """What each of `keys` that is familiar is called here; "" where none is.

    >>> our_names(["max_steps", "colour"])
    'here \\'max_steps\\' is stop.duration, such as "1000 steps"'
    """
    found = [f"'{key}' is {OUR_NAMES[key]}" for key in keys if key in OUR_NAMES]
    return f"here {'; '.join(found)}" if found else ""
