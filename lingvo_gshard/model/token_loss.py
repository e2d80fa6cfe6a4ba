"""The loss of tasks that predict tokens (section 2.2), and their metrics of a batch.

B batch, L length, V vocabulary.
"""

from __future__ import annotations

from lingvo_gshard.core.hyperparams import AnyParams
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context, LayerReport
from lingvo_gshard.layers.routing import statistics
from lingvo_gshard.layers.vocabulary import cross_entropies
from lingvo_gshard.model.spec import MetricSums


def token_loss(
    p: AnyParams,
    logits: tf.Tensor,
    labels: tf.Tensor,
    weights: tf.Tensor,
    reports: dict[str, LayerReport],
    context: Context,
) -> tuple[tf.Tensor, NestedMap]:
    """L = l_nll + k * l_aux + the layers' own router_loss, summed over the MoE layers; a scalar.

    The softmax's z-loss, if it has a weight, is a token's (log sum_v exp z_v)^2, which keeps the
    normalizer of logits z near 1.

    l_aux is 1 / E^2 in perfect balance, so k is aux_loss_weight * E^2 with the E of the layer: it
    weighs balance equally for any E, which may differ between stacks.

    Args:
      p: The Params of a TokenTask: label_smoothing and the weights of the terms.
      logits: float32 [B, L, V].
      labels: int32 [B, L].
      weights: float32 [B, L], 0 at padding.
      reports: The layers' reports, by layer.
      context: The context of the pass, which may be over one of a batch's microbatches.

    Returns:
      The loss, and the terms of its metrics (see Task.Loss): loss; nll, in nats a token, without
      smoothing; aux_loss, the unweighted sum of l_aux; num_tokens; mean_squares, of each layer's
      output; and routing, by field of Routing and layer.
    """
    # l_nll of each token, with a share of the target's mass spread over all pieces.
    with tf.name_scope("softmax"):
        nll, spread, normalizer = cross_entropies(logits, labels)
    token_losses = nll + p.label_smoothing * (spread - nll)
    if p.z_loss_weight:
        token_losses += p.z_loss_weight * tf.square(normalizer)

    # Its mean over the tokens; a batch of padding has 0 tokens.
    num_tokens = tf.reduce_sum(weights)
    per_token = 1.0 / context.tokens_of_mean(num_tokens)

    # l_aux, which a dense model lacks.
    routings = [report.routing for report in reports.values() if report.routing is not None]
    aux_loss = _sum([routing.aux_loss for routing in routings])
    balance_loss = _sum([routing.balance_loss for routing in routings])

    loss = tf.reduce_sum(token_losses * weights) * per_token + p.aux_loss_weight * balance_loss
    for routing in routings:
        if routing.router_loss is not None:
            loss += routing.router_loss
    return loss, NestedMap(
        loss=loss,
        nll=tf.reduce_sum(nll * weights) * per_token,
        aux_loss=aux_loss,
        num_tokens=num_tokens,
        mean_squares=NestedMap({name: report.mean_square for name, report in reports.items()}),
        routing=_routing_by_field(reports),
    )


def metrics(terms: NestedMap) -> NestedMap:
    """Returns the metrics of a batch, given the terms of token_loss; see Task.Metrics.

    activation_norms, the root mean square of each layer's output, replace mean_squares; and routing
    has the statistics of a Routing by name and layer.
    """
    routing = NestedMap(terms.routing)
    for layer, sent_E in routing.pop("sent_E", NestedMap()).items():
        for name, tensor in statistics({"sent_E": sent_E}).items():
            by_layer = routing.setdefault(name, NestedMap())
            by_layer[layer] = tensor

    rest = {name: value for name, value in terms.items() if name != "mean_squares"}
    norms = terms.mean_squares.Transform(lambda mean_square: mean_square**0.5)
    return NestedMap(rest, activation_norms=norms, routing=routing)


def eval_metrics(metrics: NestedMap) -> MetricSums:
    """Returns the metrics of evaluation for a batch; each is a mean over its tokens."""
    means = {"nll": metrics.nll, "aux_loss": metrics.aux_loss}
    for field, by_layer in metrics.routing.items():
        for layer, value in by_layer.items():
            means[f"{field}_{layer}"] = value

    num_tokens = metrics.num_tokens
    return {name: (mean * num_tokens, num_tokens) for name, mean in means.items()}


def valid_mask(segment_ids: tf.Tensor) -> tf.Tensor:
    """Returns float32 [B, L] of int32 segment ids: 0 at padding, whose segment is 0, else 1."""
    return tf.cast(segment_ids > 0, tf.float32)


def named(stack: str, reports: list[LayerReport]) -> dict[str, LayerReport]:
    """Returns the reports of a stack's layers by names such as `encoder_1`."""
    return {f"{stack}_{index}": report for index, report in enumerate(reports)}


def _sum(losses: list[tf.Tensor]) -> tf.Tensor:
    """Returns the sum of scalars, 0 for an empty list."""
    return tf.add_n(losses) if losses else tf.constant(0.0)


def _routing_by_field(reports: dict[str, LayerReport]) -> NestedMap:
    """Returns the tensors of each field of Routing by layer; empty without MoE layers."""
    by_field = NestedMap()
    for layer, report in reports.items():
        if report.routing is None:
            continue
        for field, tensor in report.routing.by_name().items():
            by_layer = by_field.setdefault(field, NestedMap())
            by_layer[layer] = tensor
    return by_field
