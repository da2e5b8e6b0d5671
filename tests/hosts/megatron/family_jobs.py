"""A small model of a family, trained by Megatron-LM: its logits, and what it saves after each of two updates."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY, SEQUENCE = 64, 8
LIKE_LLAMA = (
    "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights --normalization RMSNorm"
    " --position-embedding-type rope --no-rope-fusion --kv-channels 8 "
)
RUN = (
    f"--norm-epsilon 1e-5 --num-layers 2 --hidden-size 16 --ffn-hidden-size 24 --vocab-size {VOCABULARY}"
    " --weight-decay 0 --clip-grad 0 --lr-decay-style constant --lr 1e-2 --min-lr 1e-2 --ckpt-format torch_dist"
    " --global-batch-size 1 --no-check-for-nan-in-loss-and-grad "
)


def batch(number: int) -> torch.Tensor:
    """Tokens of three samples; the model is asked for each sample's next token but the last."""
    return torch.randint(0, VOCABULARY, (3, SEQUENCE + 1), generator=torch.Generator().manual_seed(number))


def trained(arguments: str, folders: list[str]) -> dict[str, Any]:
    """Make an update and save into each folder in turn; the logits are those of what the first folder has."""
    import format_jobs
    from devices import DEVICE
    from megatron.training import checkpointing, get_args

    _build_layers_of_family()
    models, optimizer, scheduler = format_jobs._setup(RUN + arguments)
    (model,), logits = models, None
    positions = torch.arange(SEQUENCE).expand(3, -1)
    mask = torch.ones(SEQUENCE, SEQUENCE).triu(1).bool()[None, None]
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for one in model.parameters():  # norms and biases, too: one that is exchanged for another must show
            one += 0.2 * torch.randn(one.shape, generator=noise)
    for number, folder in enumerate(folders, 1):
        tokens = batch(number).to(DEVICE)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous()).mean().backward()
        model.finish_grad_sync()
        optimizer.step()
        args = get_args()
        args.save, args.iteration, args.use_dist_ckpt = folder, number, True
        checkpointing.save_checkpoint(number, models, optimizer, scheduler, 0, checkpointing_context={})
        if logits is None:
            with torch.no_grad():
                logits = model(tokens[:, :-1], positions, mask).cpu()
    assert logits is not None
    return {"logits": logits.tolist()}


def _build_layers_of_family() -> None:
    """Let small_gpt build layers with norms of queries and keys, or with multi-latent attention, if asked to."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.training import get_args
    from megatron.training.argument_utils import core_transformer_config_from_args

    plain = gpt_layer_specs.get_gpt_layer_local_spec

    def layers(*given: Any, **more: Any) -> Any:
        args = get_args()
        if more or not args.multi_latent_attention:  # a block asks for its layers by keywords
            return plain(*given, **{"qk_layernorm": args.qk_layernorm, **more})
        config = core_transformer_config_from_args(args)
        block = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        for layer in block.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = _CausalAttention
        return block

    gpt_layer_specs.get_gpt_layer_local_spec = layers


class _CausalAttention(torch.nn.Module):
    """The product of attention without parameters: for heads of two sizes Megatron-LM needs Transformer Engine."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **more: Any) -> None:
        super().__init__()
        self.scale, self.current_max_attn_logits = softmax_scale, None

    def forward(self, query: Any, key: Any, value: Any, *more: Any, **others: Any) -> Any:
        heads = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        found = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, scale=self.scale)
        return found.permute(2, 0, 1, 3).flatten(2)
