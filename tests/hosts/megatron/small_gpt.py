"""`megatron.training.pretrain` of a GPT of two layers, and a record of what its optimizer steps used."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import logs
import torch
from devices import BACKEND, DEVICE
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only

VOCABULARY = 50
SEQUENCE = 8
SAMPLES = 4000
GROUP_KEYS = ("lr", "weight_decay", "betas", "eps", "max_lr", "min_lr", "wd_mult", "step", "default_config")

MODEL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 32 --seq-length 8"
    " --max-position-embeddings 8 --tokenizer-type NullTokenizer --vocab-size 63 --make-vocab-size-divisible-by 64"
    f" --transformer-impl local --distributed-backend {BACKEND} --num-workers 0 --no-masked-softmax-fusion"
    " --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-persist-layer-norm"
    " --no-gradient-accumulation-fusion --hidden-dropout 0.0 --attention-dropout 0.0"
    " --eval-iters 0 --eval-interval 1000 --log-interval 1 --seed 7"
)


class Numbers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sample `i` is a row of numbers made from `i`, and says which one it is."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = (torch.arange(SEQUENCE + 1) * 3 + index * 7) % VOCABULARY
        return {"tokens": row[:-1], "labels": row[1:], "index": torch.tensor(index)}


class Record:
    """What one rank's run did: each optimizer step, the samples that it took, and its state at both ends."""

    def __init__(self) -> None:
        self.steps: list[list[dict[str, Any]]] = []
        self.samples: list[int] = []
        self.clips: list[float] = []
        self.first: list[list[dict[str, torch.Tensor]]] = []
        self.weights: dict[str, torch.Tensor] | None = None
        self.random: list[float] = []
        self.optimizers: list[torch.optim.Optimizer] = []

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not any(optimizer is known for known in self.optimizers):
            self.optimizers.append(optimizer)
            self.first.append(self.held()[-1])
        self.steps.append([_plain(group) for group in optimizer.param_groups])

    def held(self) -> list[list[dict[str, torch.Tensor]]]:
        """For every optimizer and parameter: the master (or weight) and each state, copied."""
        return [
            [
                {"master": p.detach().clone(), **{k: _copy(v) for k, v in optimizer.state.get(p, {}).items()}}
                for group in optimizer.param_groups
                for p in group["params"]
            ]
            for optimizer in self.optimizers
        ]

    def result(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "samples": self.samples,
            "clips": self.clips,
            "first": self.first,
            "weights": self.weights,
            "last": self.held(),
            "random": self.random,
        }


def _random() -> list[float]:
    """What Python's and torch's generators will say next, without asking them."""
    held = random.getstate(), torch.get_rng_state()
    said = [random.random(), float(torch.rand(()))]
    random.setstate(held[0])
    torch.set_rng_state(held[1])
    return said


def _copy(value: Any) -> torch.Tensor:
    return value.detach().clone() if isinstance(value, torch.Tensor) else torch.tensor(float(value))


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    held = {key: group[key] for key in GROUP_KEYS if key in group}
    return {key: float(value) if isinstance(value, torch.Tensor) else value for key, value in held.items()}


def pretrain(arguments: list[str], hooks: bool = True, asked_before: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run Megatron's own `pretrain` with the command line `arguments`; this rank's record and Megatron's counters.

    `asked_before` is a policy that another place, such as a launcher, has given.
    """
    import ds_reshard
    from ds_reshard.resume import policy_sources
    from ds_reshard.resume.policy import Given

    if hooks:
        ds_reshard.install("megatron")
    if asked_before is not None:
        policy_sources.ask(Given(place="the launcher", values=asked_before))
    sys.argv = ["pretrain_small_gpt.py", *MODEL.split(), *arguments]
    from megatron.core.enums import ModelType
    from megatron.core.optimizer import optimizer
    from megatron.training import get_args
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.training import pretrain as run

    record = Record()
    register_optimizer_step_pre_hook(record.before_step)
    clip = optimizer.clip_grad_by_total_norm_fp32
    optimizer.clip_grad_by_total_norm_fp32 = lambda params, max_norm, *rest, **options: (
        record.clips.append(max_norm),
        clip(params, max_norm, *rest, **options),
    )[1]
    args = parse_and_validate_args()
    try:
        with logs.first_update() as told:
            run(
                pretrain_cfg_container_from_args(args),
                _datasets(),
                model_type=ModelType.encoder_or_decoder,
                forward_step_func=functools.partial(_forward, record),
                model_provider=_model,
            )
    except SystemExit as end:  # how Megatron ends at --exit-interval
        if end.code not in (None, 0):
            raise
    args = get_args()
    counters = {
        name: getattr(args, name) for name in ("iteration", "curr_iteration", "consumed_train_samples", "train_iters")
    }
    report = ds_reshard.last_report()
    return {
        **record.result(),
        **counters,
        "told": told,
        "applied": policy_sources.applied(),
        "report": report.to_json() if report is not None else None,
    }


def refused(arguments: list[str], unreadable: bool = False) -> dict[str, Any]:
    """`pretrain` that ends with an error from its load: what the load had changed by then, and the error.

    `unreadable` hides the checkpoint from all but Megatron itself.
    """
    import ds_reshard
    from ds_reshard.hosts.megatron import load

    ds_reshard.install("megatron")
    if unreadable:
        load.find_saved = lambda arguments: None
    return ended(lambda: pretrain(arguments))


def ended(run: Callable[[], object]) -> dict[str, Any]:
    """What a run that ends with an error from its load says, and what of the state the load had changed by then."""
    from megatron.training import training

    from ds_reshard.errors import ReshardError

    changed: list[str] = []
    load = training.load_checkpoint

    def watched(models: Any, optimizer: Any, scheduler: Any, *rest: Any, **more: Any) -> Any:
        before = _everything(models, optimizer, scheduler)
        try:
            return load(models, optimizer, scheduler, *rest, **more)
        except ReshardError:
            after = _everything(models, optimizer, scheduler)
            assert before and before.keys() <= after.keys()
            changed.extend(name for name in after if not _same(before.get(name), after[name]))
            raise

    training.load_checkpoint = watched
    try:
        run()
    except ReshardError as error:
        faults = [fault.where for fault in error.faults]
        return {"refused": type(error).__name__, "message": str(error), "where": faults, "changed": changed}
    return {"refused": None}


def _everything(models: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Weights, masters, the values of the groups and the schedule, copied."""
    held = {f"weight {name}": value for model in models for name, value in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        held |= {f"group {number} {name}": value for name, value in group.items() if name != "params"}
        held |= {f"master {number}.{i}": value for i, value in enumerate(group["params"])}
    held |= {f"states {i}": [*one.optimizer.state.values()] for i, one in enumerate(optimizer.chained_optimizers)}
    held |= {f"schedule {name}": value for name, value in scheduler.state_dict().items()}
    return tree_map_only(torch.Tensor, lambda value: value.detach().clone(), held)  # type: ignore[no-any-return]


def _same(one: Any, other: Any) -> bool:
    """Whether values, and all that is in them, are the same: tensors bit for bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and one.reshape(-1).view(torch.uint8).equal(other.reshape(-1).view(torch.uint8))
    if type(one) is not type(other) or not isinstance(one, dict | list | tuple):
        return repr(one) == repr(other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(value, other[name]) for name, value in one.items())
    return len(one) == len(other) and all(map(_same, one, other))


def drop(folder: str, name: str) -> dict[str, Any]:
    """Take an entry out of a `torch` checkpoint, which holds classes of Megatron."""
    (file,) = Path(folder).rglob("model_optim_rng.pt")
    states = torch.load(file, weights_only=False)
    states.pop(name)
    torch.save(states, file)
    return {}


def _datasets() -> Any:
    def provider(sizes: Any, vp_stage: int | None = None) -> tuple[Any, Any, Any]:
        return Numbers(), Numbers(), Numbers()

    provider.is_distributed = True  # type: ignore[attr-defined]
    return provider


def _model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: Any = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.training import argument_utils, arguments, get_args

    of_config = argument_utils if hasattr(argument_utils, "core_transformer_config_from_args") else arguments  # 0.17.1
    args = get_args()
    config = of_config.core_transformer_config_from_args(args) if config is None else config
    config.context_parallel_size = 1  # local attention refuses it; the groups of ranks have it
    layer = get_gpt_layer_local_spec(args.num_experts, args.moe_grouped_gemm)
    ahead = {"use_transformer_engine": False, "vp_stage": vp_stage}
    return GPTModel(
        config=config,
        transformer_layer_spec=layer,
        mtp_block_spec=get_gpt_mtp_block_spec(config, layer, **ahead) if args.mtp_num_layers else None,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
    )


def _forward(record: Record, iterator: Any, model: Any) -> Any:
    if record.weights is None:
        record.random = _random()
        record.weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    batch = next(iterator)
    record.samples += batch["index"].tolist()
    positions = torch.arange(SEQUENCE).expand(len(batch["tokens"]), -1)
    mask = torch.ones(SEQUENCE, SEQUENCE).triu(1).bool()[None, None]
    words, labels = batch["tokens"].to(DEVICE), batch["labels"].to(DEVICE)
    losses = model(words, positions.to(DEVICE), mask.to(DEVICE), labels=labels)

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        total, count = output.float().sum(), torch.tensor(output.numel(), dtype=torch.int, device=DEVICE)
        return total, count, {"lm loss": torch.stack([total.detach(), count.float()])}

    return losses, loss
