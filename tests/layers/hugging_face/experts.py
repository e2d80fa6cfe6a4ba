"""Computes layers of experts by Hugging Face's code, as numbers for tests.

Run it where torch and transformers are installed, in the root of the checkout:

    python -m tests.layers.hugging_face.experts

It writes one file for each model beside itself: random weights under the names of their module, `x`
and the output `y` of one layer, and losses by name. `d.NAME` is the gradient of sum(y * d_y) by the
weight of that name, or by `x`. torch 2.13.0 and transformers 4.55.4 made the files here.

B batch, L length, M model, H hidden, E experts, K experts of a token.
"""

import torch
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.mixtral import modeling_mixtral
from transformers.models.switch_transformers import modeling_switch_transformers

from tests.layers.hugging_face.blocks import randomized, write

B, L, M, H, E, K = 2, 9, 6, 10, 5, 3


def main() -> None:
    """Writes all files."""
    torch.manual_seed(0)
    _mixtral()
    _deepseek_v3()
    _switch()


def _mixtral():
    """K experts of a softmax, with normalized gates; each expert is a SwiGLU."""
    config = modeling_mixtral.MixtralConfig(
        hidden_size=M,
        intermediate_size=H,
        num_local_experts=E,
        num_experts_per_tok=K,
        router_jitter_noise=0.0,
    )
    layer = _randomized(modeling_mixtral.MixtralSparseMoeBlock(config))
    arrays, (_, logits) = _applied(layer)
    arrays["balance_loss"] = modeling_mixtral.load_balancing_loss_func((logits,), E, K)
    write("mixtral", layer, arrays)


def _deepseek_v3():
    """K experts of sigmoids with biases, and two shared ones."""
    config = modeling_deepseek_v3.DeepseekV3Config(
        hidden_size=M,
        moe_intermediate_size=H,
        n_routed_experts=E,
        num_experts_per_tok=K,
        n_shared_experts=2,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    layer = _randomized(modeling_deepseek_v3.DeepseekV3MoE(config))
    bias = 0.3 * torch.randn(E)
    layer.gate.e_score_correction_bias.copy_(bias)
    arrays, _ = _applied(layer)
    write("deepseek_v3", layer, arrays | {"bias": bias})


def _switch():
    """One expert, of a capacity of two tokens in each row, and both losses."""
    config = modeling_switch_transformers.SwitchTransformersConfig(
        d_model=M,
        d_ff=H,
        num_experts=E,
        expert_capacity=2,
        router_jitter_noise=0.0,
        dropout_rate=0.0,
    )
    layer = _randomized(modeling_switch_transformers.SwitchTransformersSparseMLP(config))
    arrays, (_, (logits, _)) = _applied(layer)
    chosen = logits.argmax(-1)
    probabilities = logits.softmax(-1)
    z_loss = modeling_switch_transformers.router_z_loss_func(logits)
    balance_loss = modeling_switch_transformers.load_balancing_loss_func(probabilities, chosen)
    write("switch", layer, arrays | {"z_loss": z_loss, "balance_loss": balance_loss})


def _randomized(layer):
    with torch.no_grad():
        return randomized(layer)


def _applied(layer):
    """Returns x, y and the gradients of sum(y * d_y) as arrays, and all that the layer returns."""
    x = torch.randn(B, L, M, requires_grad=True)
    result = layer(x)
    y = result[0] if isinstance(result, tuple) else result

    d_y = torch.randn(B, L, M)
    names = [path for path, _ in layer.named_parameters()]
    d_x, *d_weights = torch.autograd.grad(
        torch.sum(y * d_y), [x, *layer.parameters()], materialize_grads=True
    )
    gradients = {f"d.{name}": d for name, d in zip(names, d_weights, strict=True)}
    return {"x": x, "y": y, "d_y": d_y, "d.x": d_x} | gradients, result


if __name__ == "__main__":
    main()
