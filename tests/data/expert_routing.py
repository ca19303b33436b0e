"""How small mixtures of experts of transformers choose experts; for make_family_fixtures.py."""

import importlib

import numpy
import torch

MARGIN = 0.15  # of router logits; see choose_inputs()
SCORE_MARGIN = 0.02  # of the scores of sigmoid routers
EQUAL = 1e-4  # below it scores are made equal, or almost


def per_token(config):
    """Experts per token; None without experts. Gemma 4 has another name for it."""
    return getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None)


def is_mixture(config):
    dense = getattr(config, "first_k_dense_replace", getattr(config, "num_dense_layers", 0)) or 0
    has_experts = getattr(config, "num_local_experts", None) != 0
    return has_experts and per_token(config) is not None and dense < config.num_hidden_layers


def is_gemma(config):
    return config.model_type == "gemma4_text"


def uses_sigmoids(config):
    return config.model_type in ("glm4_moe", "minimax_m2", "deepseek_v3", "glm4_moe_lite",
                                 "deepseek_v32", "glm_moe_dsa", "solar_open", "hy_v3", "afmoe", "minimax_m3_vl_text")


def has_auxiliary_loss(config):
    return (not uses_sigmoids(config) and not is_gemma(config)
            and config.model_type not in ("mistral4", "ernie4_5_moe", "cohere2_moe"))


def run_model(model, **inputs):
    """Output of the model, and the logits [tokens, experts] of each layer that has a router."""
    if not is_mixture(model.config):
        return model(use_cache=False, **inputs), ()
    if has_auxiliary_loss(model.config):
        output = model(use_cache=False, **inputs)
        return output, output.router_logits
    # The routers of Gemma 4 return probabilities, whose logarithms differ as logits do.
    logits = torch.log if is_gemma(model.config) else lambda values: values
    found = []
    hooks = [router.register_forward_hook(
        lambda module, args, result: found.append(logits(result[0])))
             for router in routers_of(model)]
    output = model(use_cache=False, **inputs)
    for hook in hooks:
        hook.remove()
    return output, tuple(found)


def route(model, kind):
    """Makes the choice of experts depend on the tokens, and uneven: all tokens have a common direction,
    the first element, against which expert 1 of the last layer is.

    `one`: an expert of each layer gets every token. `ties`: in layer 0 every token takes expert 2 and
    one of 1 and 3, whose rows are equal; in layer 1 those of 0 and 4 are equal. Equal rows have one
    element, so that their logits are equal however a sum is rounded."""
    embedding = model.model.embed_tokens.weight.data
    embedding *= 3.0
    embedding[:, 0] += 2.0
    routers = routers_of(model)
    first, last = (getattr(router, "proj", getattr(router, "gate", router)).weight.data
                   for router in (routers[0], routers[-1]))
    first[:, 0] = last[:, 0] = 0.0
    last[1, 0] = -2.0
    if kind == "one":
        first[3, 0] = last[0, 0] = 3.0
    elif kind == "ties":
        first[[1, 3]] = last[[0, 4]] = 0.0
        first[[1, 2, 3], 0] = torch.tensor([1.0, 3.0, 1.0])
        last[[0, 4], 5] = -1.0
        for router, equal in ((routers[0], [1, 3]), (routers[-1], [0, 4])):
            if getattr(router, "bias", None) is not None:
                router.bias.data[equal] = 0.0
        if uses_sigmoids(model.config):
            first, last = corrections_of(model)[0], corrections_of(model)[-1]
            first[3] = first[1]
            last[4] = last[0] + 1e-5  # less than half the distance of bf16 values


def make_corrections(model, generator):
    """Corrections that bf16 does not represent, for GLM as large as those of published weights."""
    centre = 0.0 if model.config.model_type == "minimax_m2" else 3.0
    for correction in corrections_of(model):
        correction.copy_(centre + 0.1 * torch.randn(correction.shape, generator=generator))


def routers_of(model):
    return [router_of(layer) for layer in model.model.layers if router_of(layer) is not None]


def corrections_of(model):
    """The corrections [experts] of routers."""
    tensors = [*model.named_buffers(), *model.named_parameters()]
    return [tensor.data.view(-1) for name, tensor in tensors
            if name.endswith(("e_score_correction_bias", "mlp.expert_bias"))]


def router_of(layer):
    mlp = getattr(layer, "mlp", None) or getattr(layer, "block_sparse_moe", None)
    return (getattr(mlp, "gate", None) or getattr(mlp, "router", None) or
            getattr(layer, "router", None))


def auxiliary_loss(model, router_logits):
    """`router_logits`: of each layer that has a router, [tokens, experts]."""
    module = importlib.import_module(type(model).__module__)
    return module.load_balancing_loss_func(
        router_logits, router_logits[0].shape[-1], model.config.num_experts_per_tok)


def scores_of(model, router_logits):
    """[tokens, experts] of each layer that has a router: what the choice depends on, and by how much
    the last chosen group of each token is ahead of the next."""
    if model.config.model_type == "ernie4_5_moe":
        return [(logits.softmax(dim=-1) + correction, torch.inf)
                for logits, correction in zip(router_logits, corrections_of(model))]
    if not uses_sigmoids(model.config):
        return [(logits, torch.inf) for logits in router_logits]
    groups = getattr(model.config, "n_group", 1)
    found = []
    for logits, correction in zip(router_logits, corrections_of(model)):
        scores = logits.float().sigmoid() + correction
        ahead = torch.inf
        if groups > 1:
            kept = model.config.topk_group
            of_group = scores.view(len(scores), groups, -1).topk(2, dim=-1)[0].sum(-1)
            ahead = torch.sort(of_group, descending=True).values.diff().neg()[:, kept - 1]
            dropped = torch.ones_like(of_group).scatter_(1, of_group.topk(kept)[1], 0.0).bool()
            dropped = dropped.repeat_interleave(scores.shape[1] // groups, dim=1)
            scores = scores.masked_fill(dropped, -torch.inf)
        found.append((scores, ahead))
    return found


@torch.no_grad()
def choices(model, router_logits):
    """[tokens, experts] of each layer that has a router: whether the token takes the expert."""
    k = per_token(model.config)
    return [torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, torch.topk(scores, k)[1], True)
            for scores, _ in scores_of(model, router_logits)]


def count_choices(model, router_logits):
    counts = iter([chosen.sum(0).tolist() for chosen in choices(model, router_logits)])
    return [next(counts) if router_of(layer) is not None else [] for layer in model.model.layers]


def margins(config, scores, group_ahead):
    """[tokens] of one layer: by how much the last chosen expert is ahead of the next. Where these are
    equal, how far other experts are from them."""
    k = per_token(config)
    ahead = torch.sort(scores, descending=True).values.diff().neg().nan_to_num(torch.inf)
    others = torch.minimum(ahead[:, k - 2], ahead[:, k])
    of_experts = torch.where(ahead[:, k - 1] < EQUAL, others, ahead[:, k - 1])
    return of_experts.clamp(max=group_ahead)


@torch.no_grad()
def choose_inputs(model, sequences, documents, vocabulary):
    """Replaces inputs, from left to right, by random tokens which are far from choosing other experts in
    all layers, with and without these documents, so that bf16 and orders of sums do not change choices.

    `sequences`: [sequences, inputs + 1], in place. `documents`: the lengths of two in each sequence."""
    generator = numpy.random.default_rng(11)
    enough = SCORE_MARGIN if corrections_of(model) else MARGIN
    for sequence, lengths in zip(sequences, documents):
        for t in range(len(sequence) - 1):
            candidates = generator.permutation(vocabulary)
            inputs = torch.tensor(sequence[:t + 1]).repeat(vocabulary, 1)
            inputs[:, t] = torch.tensor(candidates)
            found = []
            for start in {0, lengths[0] if t >= lengths[0] else 0}:
                _, router_logits = run_model(model, input_ids=inputs[:, start:])
                found += [margins(model.config, *of_layer) for of_layer in scores_of(
                    model, [logits[t - start::t + 1 - start] for logits in router_logits])]
            far = torch.stack(found).amin(0)
            sequence[t] = candidates[far.clamp(max=enough).argmax()]


def lowest_of_equals(values, k, dim=-1, sorted=True):
    """torch.topk(), which may take any of equal values; this takes those of lower index."""
    found, indices = torch.sort(values, dim=dim, descending=True, stable=True)
    return found.narrow(dim, 0, k), indices.narrow(dim, 0, k)
