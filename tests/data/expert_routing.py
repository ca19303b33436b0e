"""How small mixtures of experts of transformers choose experts; for make_family_fixtures.py."""

import importlib

import numpy
import torch

MARGIN = 0.15  # of router logits; see choose_inputs()


def is_mixture(config):
    return hasattr(config, "num_experts_per_tok")


def route(model, kind):
    """Makes the choice of experts depend on the tokens, and uneven: all tokens have a common direction,
    the first element, against which expert 1 of the last layer is.

    `one`: an expert of each layer gets every token. `ties`: in layer 0 every token takes expert 2 and
    one of 1 and 3, whose rows are equal; in layer 1 those of 0 and 4 are equal. Equal rows have one
    element, so that their logits are equal however a sum is rounded."""
    embedding = model.model.embed_tokens.weight.data
    embedding *= 3.0
    embedding[:, 0] += 2.0
    routers = [router_of(layer) for layer in model.model.layers if router_of(layer) is not None]
    first, last = routers[0].weight.data, routers[-1].weight.data
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


def router_of(layer):
    return getattr(layer.mlp, "gate", None) or getattr(layer.mlp, "router", None)


def auxiliary_loss(model, router_logits):
    """`router_logits`: of each layer that has a router, [tokens, experts]."""
    module = importlib.import_module(type(model).__module__)
    return module.load_balancing_loss_func(
        router_logits, model.config.num_experts, model.config.num_experts_per_tok)


def choices(config, router_logits):
    """[tokens, experts] of each layer that has a router: whether the token takes the expert."""
    k = config.num_experts_per_tok
    return [torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, torch.topk(logits, k)[1], True)
            for logits in router_logits]


def count_choices(model, router_logits):
    counts = iter([chosen.sum(0).tolist() for chosen in choices(model.config, router_logits)])
    return [next(counts) if router_of(layer) is not None else [] for layer in model.model.layers]


def margins(config, router_logits):
    """[tokens] of one layer: by how much the last chosen expert is ahead of the next. Where these are
    equal, how far other experts are from them."""
    k = config.num_experts_per_tok
    ahead = -torch.sort(router_logits, descending=True).values.diff()
    others = torch.minimum(ahead[:, k - 2], ahead[:, k])
    return torch.where(ahead[:, k - 1] == 0.0, others, ahead[:, k - 1])


@torch.no_grad()
def choose_inputs(model, sequences, documents, vocabulary):
    """Replaces inputs, from left to right, by random tokens which are far from choosing other experts in
    all layers, with and without these documents, so that bf16 and orders of sums do not change choices.

    `sequences`: [sequences, inputs + 1], in place. `documents`: the lengths of two in each sequence."""
    generator = numpy.random.default_rng(11)
    for sequence, lengths in zip(sequences, documents):
        for t in range(len(sequence) - 1):
            candidates = generator.permutation(vocabulary)
            inputs = torch.tensor(sequence[:t + 1]).repeat(vocabulary, 1)
            inputs[:, t] = torch.tensor(candidates)
            found = []
            for start in {0, lengths[0] if t >= lengths[0] else 0}:
                output = model(input_ids=inputs[:, start:], use_cache=False)
                found += [margins(model.config, of_layer[t - start::t + 1 - start])
                          for of_layer in output.router_logits]
            far = torch.stack(found).amin(0)
            sequence[t] = candidates[far.clamp(max=MARGIN).argmax()]


def lowest_of_equals(values, k, dim=-1):
    """torch.topk(), which may take any of equal values; this takes those of lower index."""
    found, indices = torch.sort(values, dim=dim, descending=True, stable=True)
    return found.narrow(dim, 0, k), indices.narrow(dim, 0, k)
