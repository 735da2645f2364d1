"""Option names and abbreviations of other tools, for suggestions."""

from collections.abc import Iterable

from dptrain.registry.names import suggestion

# Our words, each with what others call the same thing; all as `_plain` returns them.
_OTHERS = {
    "learning_rate": "lr init_lr step_size",
    "schedule": "scheduler lr_schedule lr_scheduler warmup warmup_steps warmup_epochs warmup_ratio",
    "batch_size": "bs b batch batchsize global_batch_size train_batch_size per_device_train_batch_size",
    "epochs": "num_epochs n_epochs nb_epoch nb_epochs max_epochs num_train_epochs",
    "steps_per_epoch": "steps max_steps limit_train_batches",
    "weight_decay": "wd l2",
    "prune": "sparsity pruning prune_ratio prune_amount target_sparsity final_sparsity",
    "optimizer": "opt optim",
    "momentum": "mom",
    "beta_1": "beta1 adam_beta1",
    "beta_2": "beta2 adam_beta2",
    "epsilon": "eps adam_epsilon",
    "global_clipnorm": "clip grad_clip clip_grad max_grad_norm gradient_clip_val",
    "gradient_accumulation_steps": "grad_accum accumulate_grad_batches gradient_accumulation",
    "dropout": "dropout_rate",
    "activation": "act",
    "model": "arch network",
    "hidden": "layers units arch network hidden_size hidden_sizes hidden_dim hidden_units hidden_layers",
    "data": "dataset data_path train_data input",
    "data_dir": "data_root",
    "target": "label y target_column",
    "drop": "ignore exclude",
    "image_size": "img_size input_size resize",
    "test_data": "test_file",
    "validation_split": "val_split valid_split",
    "early_stopping": "patience",
    "out": "o output output_dir save_dir logdir run_dir checkpoint_dir",
    "log_dir": "logs logdir",
    "resume": "resume_from resume_from_checkpoint continue load ckpt",
    "checkpoint_every": "save_every save_steps",
    "seed": "random_seed random_state manual_seed",
    "seeds": "random_seed random_state manual_seed repeats num_seeds",
    "reproducible": "deterministic determinism",
    "verbose": "quiet silent q",
    "config": "c conf config_file",
    "precision": "tf32",
    "comm_dtype": "gradient_compression fp16_allreduce bf16_compress communication_data_type",
    "dtype": "float64 double amp fp16 bf16 half mixed_precision policy",
    "device": "cuda cpu gpu accelerator",
    "jit_compile": "jit compile",
    "run_eagerly": "eager",
    "dry_run": "plan_only",
    "fast_dev_run": "dry_run smoke_test",
    "max_time": "timeout time_limit",
    "stall_timeout": "timeout",
    "grid": "param params space",
    "random": "trials n_trials num_trials num_samples",
    "adaptive": "optuna bayes tpe",
    "folds": "cv kfold k_folds",
    "halving": "asha hyperband",
    "metric": "objective",
    "ranks": "n np nproc nproc_per_node num_processes ntasks world_size gpus num_gpus ngpus n_gpus devices workers "
    "num_workers gpu",
    "hosts": "nodes nnodes host",
    "hostfile": "machinefile",
    "restarts": "max_restarts retries",
    # Commands.
    "train": "fit run start",
    "launch": "mpirun mpiexec torchrun srun",
    "sweep": "search tune hpo",
    "evaluate": "eval test validate",
    "predict": "infer inference",
    "doctor": "check info env diagnose",
    "runs": "list ls compare",
    "explain": "summary profile show",
}
_MEANT: dict[str, list[str]] = {}
for _ours, _words in _OTHERS.items():
    for _word in _words.split():
        _MEANT.setdefault(_word, []).append(_ours)


def suggest(word: str, candidates: Iterable[str], further: Iterable[str] = ()) -> str:
    """Return a suggestion for the end of an 'unknown word' message, also for other tools' words.

    `further` candidates are suggested only where they end like the word or mean the same.
    """
    candidates = list(candidates)
    ends: dict[str, str] = {}
    for candidate in (*candidates, *further):
        ends.setdefault(_plain(candidate), candidate)
    plain = _plain(word)
    synonyms = [plain, *_MEANT.get(plain, [])]
    for ours in synonyms:
        if ours in ends:
            return f"; did you mean {ends[ours]!r}?"
    if "ranks" in synonyms:
        return "; mpirun sets the number of ranks: mpirun -n 4 python -m dptrain"
    return suggestion(word, candidates)


def _plain(word: str) -> str:
    """Return the last part of a dotted name or option in lower case, with underscores."""
    return word.lstrip("-").rpartition(".")[2].lower().replace("-", "_")
